//! The package managers, and what each calls the tools.

use super::{Machine, Tool};

/// In the order of the names in [`Manager::package`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Manager {
    Apt,
    Dnf,
    Pacman,
    Zypper,
    Apk,
    Brew,
    Winget,
}

/// What this user may do with the package manager, without being asked for a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rights {
    Enough,
    Sudo,
    None,
}

impl Rights {
    pub(super) fn find(machine: &impl Machine, manager: Manager) -> Self {
        match manager {
            Manager::Brew => Self::Enough,
            Manager::Winget => Self::None,
            _ if machine.is_root() => Self::Enough,
            _ if machine.answers("sudo", &["-n", "true"]) => Self::Sudo,
            _ => Self::None,
        }
    }
}

impl Manager {
    const LINUX: [Self; 5] = [Self::Apt, Self::Dnf, Self::Pacman, Self::Zypper, Self::Apk];

    pub(super) fn find(machine: &impl Machine) -> Option<Self> {
        let candidates: &[Self] = match machine.os() {
            "linux" => &Self::LINUX,
            "macos" => &[Self::Brew],
            "windows" => &[Self::Winget],
            _ => &[],
        };
        candidates.iter().copied().find(|manager| machine.answers(manager.program(), &["--version"]))
    }

    fn program(self) -> &'static str {
        match self {
            Self::Apt => "apt-get",
            Self::Dnf => "dnf",
            Self::Pacman => "pacman",
            Self::Zypper => "zypper",
            Self::Apk => "apk",
            Self::Brew => "brew",
            Self::Winget => "winget",
        }
    }

    fn package(self, tool: Tool) -> &'static str {
        let names: [&str; 7] = match tool {
            Tool::Compiler => {
                ["g++", "gcc-c++", "gcc", "gcc-c++", "g++", "gcc", "Microsoft.VisualStudio.2022.BuildTools"]
            }
            Tool::Make => ["make", "make", "make", "make", "make", "make", "GnuWin32.Make"],
            Tool::CMake => ["cmake", "cmake", "cmake", "cmake", "cmake", "cmake", "Kitware.CMake"],
            Tool::Libclang => {
                ["libclang-dev", "clang-devel", "clang", "clang-devel", "clang-dev", "llvm", "LLVM.LLVM"]
            }
            Tool::Pip => {
                let python = "Python.Python.3.13";
                ["python3-pip", "python3-pip", "python-pip", "python3-pip", "py3-pip", "python", python]
            }
            Tool::Clang => ["clang", "clang", "clang", "clang", "clang", "llvm", "LLVM.LLVM"],
            Tool::Doctest => [
                "doctest-dev",
                "doctest-devel",
                "doctest",
                "doctest-devel",
                "doctest-dev",
                "doctest",
                "doctest",
            ],
            Tool::PkgConfig => {
                ["pkg-config", "pkgconf", "pkgconf", "pkg-config", "pkgconf", "pkgconf", "pkgconf"]
            }
        };
        names[self as usize]
    }

    /// The arguments of each call that it takes, without the packages, which end the last one.
    fn calls(self) -> &'static [&'static [&'static str]] {
        match self {
            // A machine that has just started may be updating itself: wait for its lock.
            Self::Apt => &[
                &["apt-get", "-o", "DPkg::Lock::Timeout=300", "update"],
                &["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends"],
            ],
            Self::Dnf => &[&["dnf", "install", "-y"]],
            Self::Pacman => &[&["pacman", "-Sy", "--needed", "--noconfirm"]],
            Self::Zypper => &[&["zypper", "--non-interactive", "install"]],
            Self::Apk => &[&["apk", "add", "--no-cache"]],
            Self::Brew => &[&["brew", "install"]],
            // Only ever printed: see `line`.
            Self::Winget => &[],
        }
    }

    /// The commands that install these tools with these rights.
    pub(super) fn commands(self, rights: Rights, tools: &[Tool]) -> Vec<Vec<String>> {
        let prefix: &[&str] = match (self, rights) {
            (Self::Apt, Rights::Sudo) => &["sudo", "-n", "env", "DEBIAN_FRONTEND=noninteractive"],
            (Self::Apt, _) => &["env", "DEBIAN_FRONTEND=noninteractive"],
            (_, Rights::Sudo) => &["sudo", "-n"],
            _ => &[],
        };
        let mut commands: Vec<Vec<&str>> = self.calls().iter().map(|call| [prefix, call].concat()).collect();
        if let Some(last) = commands.last_mut() {
            last.extend(tools.iter().map(|tool| self.package(*tool)));
        }
        commands.into_iter().map(|words| words.into_iter().map(str::to_owned).collect()).collect()
    }

    /// The line that a user types to install these tools.
    pub(super) fn line(self, tools: &[Tool]) -> String {
        let packages: Vec<_> = tools.iter().map(|tool| self.package(*tool)).collect();
        if self == Self::Winget {
            // winget takes one id a call, and PowerShell separates calls with a semicolon.
            let workload = "--override \"--quiet --wait --add Microsoft.VisualStudio.Workload.VCTools --includeRecommended\"";
            let calls = tools.iter().map(|tool| {
                let call = format!("winget install --exact --id {}", self.package(*tool));
                if *tool == Tool::Compiler { format!("{call} {workload}") } else { call }
            });
            return calls.collect::<Vec<_>>().join("; ");
        }
        let calls = self.calls().iter().map(|call| format!("sudo {}", call.join(" ")));
        format!("{} {}", calls.collect::<Vec<_>>().join(" && "), packages.join(" "))
    }
}
