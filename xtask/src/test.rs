//! Everything that has to hold before a change goes in, as a list of steps.

use std::fmt::Write as _;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::{Result, cxx, fixtures, setup, sh, tidy};

/// The workspace's own features that every step builds with. One set for all of them, so that nothing is built twice.
const FEATURES: &[&str] = &["async", "shapes"];

#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Cargo features to build with besides the project's own, such as cuda, metal or vulkan
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(crate) features: Vec<String>,
    /// Fail if Cargo.lock would have to change
    #[arg(long)]
    pub(crate) locked: bool,
}

/// One step. It is left out when a step that it needs has failed.
pub(crate) struct Step {
    name: &'static str,
    needs: &'static [&'static str],
    run: fn(&Args) -> Result,
}

const SETUP: Step = Step { name: "setup", needs: &[], run: |_| setup::run(&setup::Args::default()) };
const SETUP_CXX: Step = Step { name: "setup-cxx", needs: &["setup"], run: |_| setup::for_cxx_tests() };
const FIXTURES: Step = Step { name: "fixtures", needs: &["setup"], run: |_| fixtures::run() };
const TIDY: Step = Step { name: "tidy", needs: &[], run: |_| tidy::run() };
const COMPONENTS: Step =
    Step { name: "components", needs: &[], run: |_| ["fmt", "clippy"].into_iter().try_for_each(component) };
const FMT: Step = Step {
    name: "fmt",
    needs: &["components"],
    run: |_| sh::run(sh::cargo().args(["fmt", "--all", "--check"])),
};
const CLIPPY: Step = Step {
    name: "clippy",
    needs: &["setup", "components"],
    run: |args| cargo(args, &["clippy", "--all-targets"], &["--", "-D", "warnings"]),
};
const TESTS: Step =
    Step { name: "test", needs: &["fixtures"], run: |args| cargo(args, &["test", "--no-fail-fast"], &[]) };
const DOC: Step = Step {
    name: "doc",
    needs: &["setup"],
    run: |args| {
        let mut command = workspace(args, &["doc", "--no-deps"]);
        sh::run(command.env("RUSTDOCFLAGS", "-D warnings"))
    },
};

const CXX: Step = Step { name: "cxx", needs: &["fixtures", "setup-cxx"], run: cxx::test };

/// `cargo xtask test`, the quickest steps first.
pub(crate) const ALL: &[Step] = &[SETUP, COMPONENTS, FMT, TIDY, FIXTURES, CLIPPY, DOC, TESTS, SETUP_CXX, CXX];
/// `cargo xtask cxx`.
pub(crate) const CXX_ONLY: &[Step] = &[SETUP, FIXTURES, SETUP_CXX, CXX];
/// `cargo xtask lint`.
pub(crate) const LINT: &[Step] = &[SETUP, COMPONENTS, FMT, TIDY, CLIPPY];
/// `cargo xtask docs`.
pub(crate) const DOCS: &[Step] = &[SETUP, DOC];

/// Has rustup add a part of the toolchain that its smallest installation lacks.
fn component(command: &str) -> Result {
    if sh::succeeds(sh::cargo().args([command, "--version"])) {
        return Ok(());
    }
    let name = if command == "fmt" { "rustfmt" } else { command };
    sh::run(Command::new("rustup").args(["component", "add", name]))
}

/// The value of cargo's `--features` for the whole workspace: the project's own, and those that a user adds.
pub(crate) fn features(more: &[String]) -> String {
    FEATURES.iter().copied().chain(more.iter().map(String::as_str)).collect::<Vec<_>>().join(",")
}

/// Cargo on the whole workspace, in the one profile and with the one set of features that all steps share.
pub(crate) fn workspace(args: &Args, words: &[&str]) -> Command {
    let mut command = sh::cargo();
    command.args(words).args(["--workspace", "--release", "--features"]).arg(features(&args.features));
    if args.locked {
        command.arg("--locked");
    }
    command
}

fn cargo(args: &Args, words: &[&str], tail: &[&str]) -> Result {
    sh::run(workspace(args, words).args(tail))
}

enum Outcome {
    Passed(Duration),
    Failed(Duration),
    NotRun(&'static str),
}

/// Runs the steps, all that can be run, and ends with a table of them.
pub(crate) fn run(args: &Args, steps: &[Step]) -> Result {
    let outcomes = run_steps(args, steps);
    eprint!("\n{}", table(&outcomes));
    let bad = outcomes.iter().filter(|(_, outcome)| !matches!(outcome, Outcome::Passed(_)));
    let bad: Vec<_> = bad.map(|(name, _)| *name).collect();
    if bad.is_empty() { Ok(()) } else { Err(format!("not passed: {}", bad.join(", ")).into()) }
}

fn run_steps(args: &Args, steps: &[Step]) -> Vec<(&'static str, Outcome)> {
    let mut outcomes: Vec<(&'static str, Outcome)> = Vec::new();
    for step in steps {
        let failed = |need: &&&str| {
            outcomes.iter().any(|(name, outcome)| name == *need && !matches!(outcome, Outcome::Passed(_)))
        };
        if let Some(need) = step.needs.iter().find(failed) {
            outcomes.push((step.name, Outcome::NotRun(need)));
            continue;
        }
        eprintln!("\n== {}", step.name);
        let start = Instant::now();
        let result = (step.run)(args);
        let elapsed = start.elapsed();
        let outcome = match result {
            Ok(()) => Outcome::Passed(elapsed),
            Err(error) => {
                eprintln!("{} failed: {error}", step.name);
                Outcome::Failed(elapsed)
            }
        };
        outcomes.push((step.name, outcome));
    }
    outcomes
}

fn table(outcomes: &[(&'static str, Outcome)]) -> String {
    let mut table = format!("{:<12}{:<28}{:>8}\n", "step", "result", "seconds");
    for (name, outcome) in outcomes {
        let (result, seconds) = match outcome {
            Outcome::Passed(time) => ("passed".to_owned(), format!("{:.1}", time.as_secs_f64())),
            Outcome::Failed(time) => ("FAILED".to_owned(), format!("{:.1}", time.as_secs_f64())),
            Outcome::NotRun(need) => (format!("not run: {need} failed"), "-".to_owned()),
        };
        let _ = writeln!(table, "{name:<12}{result:<28}{seconds:>8}");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Step = Step { name: "good", needs: &[], run: |_| Ok(()) };
    const BAD: Step = Step { name: "bad", needs: &[], run: |_| Err("it broke".into()) };
    const AFTER_BAD: Step = Step { name: "after", needs: &["bad"], run: |_| Ok(()) };
    const AFTER_AFTER: Step = Step { name: "last", needs: &["after"], run: |_| Ok(()) };

    #[test]
    fn a_failure_leaves_out_what_needs_it_and_nothing_else() {
        let steps = [BAD, AFTER_BAD, AFTER_AFTER, GOOD];
        let error = run(&Args::default(), &steps).expect_err("a step failed").to_string();
        assert_eq!(error, "not passed: bad, after, last");
        let table = table(&run_steps(&Args::default(), &steps));
        let lines: Vec<_> = table.lines().collect();
        assert_eq!(lines.len(), 5);
        assert!(lines[1].contains("FAILED"), "{table}");
        assert!(lines[2].contains("not run: bad failed"), "{table}");
        assert!(lines[3].contains("not run: after failed"), "{table}");
        assert!(lines[4].contains("passed"), "{table}");
    }

    #[test]
    fn every_step_can_name_what_it_needs() {
        for steps in [ALL, CXX_ONLY, LINT, DOCS] {
            for (index, step) in steps.iter().enumerate() {
                let earlier: Vec<_> = steps[..index].iter().map(|step| step.name).collect();
                assert!(
                    step.needs.iter().all(|need| earlier.contains(need)),
                    "{} comes too early",
                    step.name
                );
            }
        }
    }

    #[test]
    fn a_users_features_come_on_top() {
        assert_eq!(features(&["metal".to_owned()]), "async,shapes,metal");
    }
}
