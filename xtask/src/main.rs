//! The project's chores, each one command: `cargo xtask --help` lists them. It needs nothing but Rust itself, so that it
//! can set up a new machine.

mod bench;
mod cxx;
mod demo;
mod dist;
mod fixtures;
mod msrv;
mod sanitize;
mod setup;
mod sh;
mod test;
mod tidy;

use std::process::ExitCode;

use clap::Parser;

/// What every command ends with.
pub(crate) type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's chores, each one command")]
enum Cli {
    /// Find a C++ compiler, make, CMake, libclang and pip, and install what is missing
    Setup(setup::Args),
    /// Fetch the real models of fixtures/manifest.toml into the cache, and check those that are there
    Fixtures,
    /// Set up, build, and stream four completions at once from a real model
    Demo(demo::Args),
    /// Set up, fetch the models, then check formatting, lints, tests, documentation and the C++ API
    Test(test::Args),
    /// What CI runs: `test`, with Cargo.lock as it is
    Ci(test::Args),
    /// Check formatting, clippy's lints and the project's own rules
    Lint(test::Args),
    /// Build the documentation; a warning is an error
    Docs(test::Args),
    /// Run the matrix of benches, and keep its results with a report and plots
    Bench(bench::Args),
    /// Check the C++ API alone: header, contract, install tree and the examples that use it
    Cxx(test::Args),
    /// Write an install tree for C++ hosts: header, libraries, CMake package, pkg-config file, licences
    Dist(dist::Args),
    /// Run the C++ tests and a random load under the sanitizers
    Sanitize(sanitize::Args),
    /// Check that the oldest supported Rust compiles everything
    Msrv,
    /// Check the dependencies' licences and sources with cargo-deny
    Deny,
}

fn main() -> ExitCode {
    let result = match Cli::parse() {
        Cli::Setup(args) => setup::run(&args),
        Cli::Fixtures => fixtures::run(),
        Cli::Demo(args) => demo::run(&args),
        Cli::Test(args) => test::run(&args, test::ALL),
        Cli::Ci(args) => test::run(&test::Args { locked: true, ..args }, test::ALL),
        Cli::Lint(args) => test::run(&args, test::LINT),
        Cli::Docs(args) => test::run(&args, test::DOCS),
        Cli::Bench(args) => bench::run(&args),
        Cli::Cxx(args) => test::run(&args, test::CXX_ONLY),
        Cli::Dist(args) => dist::run(&args),
        Cli::Sanitize(args) => sanitize::run(&args),
        Cli::Msrv => msrv::run(),
        Cli::Deny => sh::run(sh::cargo().args(["deny", "check"])),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
