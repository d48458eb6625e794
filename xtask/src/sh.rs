//! Running other programs.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ::fixtures::manifest::{CACHE_VARIABLE, TEST_MODEL_VARIABLE};

use crate::Result;

/// The workspace's root.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a folder of the workspace")
}

/// Cargo, to be run in the workspace's root.
///
/// The paths that a user gave by an environment variable are made absolute, because tests run in their package's folder.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    for variable in [CACHE_VARIABLE, TEST_MODEL_VARIABLE] {
        if let Some(path) = env::var_os(variable).filter(|path| !path.is_empty()) {
            command.env(variable, absolute(Path::new(&path)));
        }
    }
    command
}

/// The path as seen from the folder that xtask was started in.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Where cargo puts the programs that it builds, `xtask` among them.
pub(crate) fn programs() -> Result<PathBuf> {
    let xtask = env::current_exe()?;
    Ok(xtask.parent().ok_or("xtask's own path has no folder")?.to_owned())
}

/// Shows a command, runs it, and makes an error of a failure.
pub(crate) fn run(command: &mut Command) -> Result {
    let shown = show(command);
    eprintln!("$ {shown}");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{shown}` failed: {status}").into()),
        Err(error) => Err(format!("`{shown}` cannot be started: {error}").into()),
    }
}

/// Whether a program is there and answers these arguments with success.
pub(crate) fn answers(program: &str, arguments: &[&str]) -> bool {
    succeeds(Command::new(program).args(arguments))
}

/// Whether a command can be started and succeeds. Nothing of it is seen.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn show(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_stem().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
