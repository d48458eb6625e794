//! Finds the tools that llama.cpp's build and the models' download need, and installs those that are missing where it may.

mod libclang;
mod packages;

use std::env;
use std::path::PathBuf;
use std::process::Command;

use crate::{Result, sh};
use packages::{Manager, Rights};

#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Print the command that installs what is missing, but do not run it
    #[arg(long)]
    no_install: bool,
}

/// A tool that has to be there, in the order in which they are looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tool {
    Compiler,
    Make,
    CMake,
    Libclang,
    Pip,
    Clang,
    Doctest,
    PkgConfig,
}

impl Tool {
    /// What building the project and fetching its models takes.
    const BUILD: &[Self] = &[Self::Compiler, Self::Make, Self::CMake, Self::Libclang, Self::Pip];
    /// What the tests of the C++ API take besides.
    const CXX_TESTS: &[Self] = &[Self::Clang, Self::Doctest, Self::PkgConfig];

    fn name(self) -> &'static str {
        match self {
            Self::Compiler => "a C++ compiler",
            Self::Make => "make",
            Self::CMake => "CMake",
            Self::Libclang => "libclang",
            Self::Pip => "Python 3 with pip",
            Self::Clang => "clang++",
            Self::Doctest => "doctest",
            Self::PkgConfig => "pkg-config",
        }
    }

    fn purpose(self) -> &'static str {
        match self {
            Self::Compiler | Self::Make | Self::CMake => "llama.cpp is built with it",
            Self::Libclang => "llama.cpp's headers are read with it; its own headers are needed too",
            Self::Pip => "the models are fetched with it",
            Self::Clang | Self::Doctest | Self::PkgConfig => "the C++ API is tested with it",
        }
    }
}

/// What set-up asks of a machine; tests have one of their own.
trait Machine {
    fn os(&self) -> &'static str;
    fn variable(&self, name: &str) -> Option<String>;
    fn answers(&self, program: &str, arguments: &[&str]) -> bool;
    fn is_root(&self) -> bool;
    fn libclang(&self) -> Option<PathBuf>;
}

struct ThisMachine;

impl Machine for ThisMachine {
    fn os(&self) -> &'static str {
        env::consts::OS
    }

    fn variable(&self, name: &str) -> Option<String> {
        env::var(name).ok().filter(|value| !value.is_empty())
    }

    fn answers(&self, program: &str, arguments: &[&str]) -> bool {
        sh::answers(program, arguments)
    }

    fn is_root(&self) -> bool {
        let id = Command::new("id").arg("-u").output();
        id.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
    }

    fn libclang(&self) -> Option<PathBuf> {
        libclang::find()
    }
}

pub(crate) fn run(args: &Args) -> Result {
    ensure(Tool::BUILD, args.no_install)
}

/// What the tests of the C++ API need besides, where there are any.
pub(crate) fn for_cxx_tests() -> Result {
    if cfg!(windows) { Ok(()) } else { ensure(Tool::CXX_TESTS, false) }
}

fn ensure(tools: &[Tool], no_install: bool) -> Result {
    let missing = missing(&ThisMachine, tools);
    if missing.is_empty() {
        eprintln!("setup: {} are there", names(tools));
        return Ok(());
    }
    let plan = Plan::new(&ThisMachine, &missing);
    let Plan::Install(commands) = plan.unless(no_install) else {
        return Err(plan.text(&missing).into());
    };
    eprintln!("setup: {} missing, installing", names(&missing));
    let mut failures = Vec::new();
    for words in commands {
        // An update that fails for one of many package sources still lets the installation succeed.
        if let Err(error) = sh::run(Command::new(&words[0]).args(&words[1..])) {
            failures.push(error.to_string());
        }
    }
    let still = self::missing(&ThisMachine, tools);
    if still.is_empty() {
        return Ok(());
    }
    failures.push(format!("after the installation still missing: {}", names(&still)));
    Err(failures.join("\n").into())
}

/// How Python with pip is called on this machine.
pub(crate) fn python() -> Result<&'static [&'static str]> {
    find_python(&ThisMachine).ok_or_else(|| "Python 3 with pip is missing: `cargo xtask setup`".into())
}

fn find_python(machine: &impl Machine) -> Option<&'static [&'static str]> {
    // The system's own Python comes after the one on the PATH: pip may have been installed for that one only.
    const UNIX: &[&[&str]] = &[&["python3"], &["/usr/bin/python3"], &["python"]];
    const WINDOWS: &[&[&str]] = &[&["py", "-3"], &["python"], &["python3"]];
    let candidates = if machine.os() == "windows" { WINDOWS } else { UNIX };
    candidates.iter().copied().find(|words| {
        let arguments = [&words[1..], &["-m", "pip", "--version"]].concat();
        machine.answers(words[0], &arguments)
    })
}

fn missing(machine: &impl Machine, tools: &[Tool]) -> Vec<Tool> {
    tools.iter().copied().filter(|tool| !is_there(machine, *tool)).collect()
}

fn is_there(machine: &impl Machine, tool: Tool) -> bool {
    let windows = machine.os() == "windows";
    match tool {
        // On Windows the `cc` crate and CMake find Visual Studio by themselves, as `vswhere` does.
        Tool::Compiler if windows => machine.answers("cl", &[]) || visual_studio(machine),
        Tool::Compiler => match machine.variable("CXX") {
            Some(compiler) => machine.answers(&compiler, &["--version"]),
            None => machine.answers("c++", &["--version"]) && machine.answers("cc", &["--version"]),
        },
        // CMake's default on Windows is Visual Studio, and a generator that the user names brings its own tool.
        Tool::Make => {
            windows
                || machine.variable("CMAKE_GENERATOR").is_some()
                || machine.answers("make", &["--version"])
        }
        Tool::CMake => {
            let cmake = machine.variable("CMAKE").unwrap_or_else(|| "cmake".to_owned());
            machine.answers(&cmake, &["--version"])
        }
        Tool::Libclang => machine.libclang().is_some(),
        Tool::Pip => find_python(machine).is_some(),
        Tool::Clang => machine.answers("clang++", &["--version"]),
        Tool::Doctest => {
            // CMake looks into Homebrew's folders by itself, Apple's compiler does not.
            let homebrew = ["-I/opt/homebrew/include", "-I/usr/local/include"];
            let include = ["-fsyntax-only", "-x", "c++", "-include", "doctest/doctest.h", "/dev/null"];
            let compiler = machine.variable("CXX").unwrap_or_else(|| "c++".to_owned());
            machine.answers(&compiler, &[&homebrew[..], &include].concat())
        }
        Tool::PkgConfig => machine.answers("pkg-config", &["--version"]),
    }
}

fn visual_studio(machine: &impl Machine) -> bool {
    let folder =
        machine.variable("ProgramFiles(x86)").unwrap_or_else(|| r"C:\Program Files (x86)".to_owned());
    let vswhere = format!(r"{folder}\Microsoft Visual Studio\Installer\vswhere.exe");
    // It succeeds whether there is one or not, and names its folder if there is.
    let mut command = Command::new(vswhere);
    command.args(["-latest", "-products", "*", "-property", "installationPath"]);
    command.args(["-requires", "Microsoft.VisualStudio.Component.VC.Tools.x86.x64"]);
    command.output().is_ok_and(|output| !output.stdout.trim_ascii().is_empty())
}

fn names(tools: &[Tool]) -> String {
    tools.iter().map(|tool| tool.name()).collect::<Vec<_>>().join(", ")
}

/// How what is missing gets onto the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Plan {
    /// Run these, one after the other.
    Install(Vec<Vec<String>>),
    /// The user has to run this line.
    Tell(String),
    /// No package manager that set-up knows.
    Unknown,
}

impl Plan {
    fn new(machine: &impl Machine, missing: &[Tool]) -> Self {
        // On macOS the compiler, make and libclang come with Apple's tools, whose installer asks the user.
        let from_apple =
            |tool: &Tool| matches!(tool, Tool::Compiler | Tool::Make | Tool::Libclang | Tool::Clang);
        if machine.os() == "macos" && missing.iter().any(from_apple) {
            return Self::Tell("xcode-select --install".to_owned());
        }
        let Some(manager) = Manager::find(machine) else { return Self::Unknown };
        let rights = Rights::find(machine, manager);
        match rights {
            Rights::Enough | Rights::Sudo => Self::Install(manager.commands(rights, missing)),
            Rights::None => Self::Tell(manager.line(missing)),
        }
    }

    fn unless(&self, no_install: bool) -> Self {
        match self {
            Self::Install(commands) if no_install => {
                let lines = commands.iter().map(|words| words.join(" "));
                Self::Tell(lines.collect::<Vec<_>>().join(" && "))
            }
            other => other.clone(),
        }
    }

    fn text(&self, missing: &[Tool]) -> String {
        let tools: Vec<_> =
            missing.iter().map(|tool| format!("  {} ({})", tool.name(), tool.purpose())).collect();
        let what_to_do = match self.unless(true) {
            Self::Tell(line) => format!("this installs it: {line}"),
            _ => "no package manager found that could install it".to_owned(),
        };
        format!("missing on this machine:\n{}\n{what_to_do}", tools.join("\n"))
    }
}

#[cfg(test)]
mod tests;
