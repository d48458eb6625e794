//! The oldest supported Rust, which `rust-version` in Cargo.toml names.

use std::process::Command;

use crate::{Result, setup, sh, test};

pub(crate) fn run() -> Result {
    let version = env!("CARGO_PKG_RUST_VERSION");
    setup::run(&setup::Args::default())?;
    if !sh::answers("rustup", &["--version"]) {
        return Err(format!("rustup is missing: Rust {version} is run through it").into());
    }
    if !sh::answers("rustup", &["run", version, "cargo", "--version"]) {
        let mut install = Command::new("rustup");
        install.args(["toolchain", "install", version, "--profile", "minimal", "--no-self-update"]);
        sh::run(&mut install).map_err(|error| format!("Rust {version} cannot be installed: {error}"))?;
    }
    let mut check = Command::new("rustup");
    check.current_dir(sh::root()).args(["run", version, "cargo", "check", "--workspace", "--all-targets"]);
    check.args(["--release", "--features"]).arg(test::features(&[]));
    // Each compiler has its own build of everything; apart from the others it does not push theirs out.
    check.args(["--target-dir", "target/msrv"]);
    // What cargo sets for xtask names the compiler that xtask was built with.
    for variable in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        check.env_remove(variable);
    }
    sh::run(&mut check)
}
