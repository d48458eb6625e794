use super::*;

/// A machine on which these programs answer, and no others.
#[derive(Default)]
struct Fake {
    os: &'static str,
    programs: Vec<&'static str>,
    root: bool,
    libclang: bool,
    variables: Vec<(&'static str, &'static str)>,
}

impl Machine for Fake {
    fn os(&self) -> &'static str {
        self.os
    }

    fn variable(&self, name: &str) -> Option<String> {
        self.variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    }

    fn answers(&self, program: &str, _: &[&str]) -> bool {
        self.programs.contains(&program)
    }

    fn is_root(&self) -> bool {
        self.root
    }

    fn libclang(&self) -> Option<PathBuf> {
        self.libclang.then(|| PathBuf::from("libclang.so"))
    }
}

fn bare(programs: &[&'static str]) -> Fake {
    Fake { os: "linux", programs: programs.to_vec(), ..Fake::default() }
}

#[test]
fn a_machine_with_everything_misses_nothing() {
    let machine = Fake { libclang: true, ..bare(&["c++", "cc", "make", "cmake", "python3"]) };
    assert_eq!(missing(&machine, Tool::BUILD), []);
}

#[test]
fn each_tool_is_missed_by_itself() {
    let all = ["c++", "make", "cmake", "python3"];
    for (index, tool) in [Tool::Compiler, Tool::Make, Tool::CMake, Tool::Pip].into_iter().enumerate() {
        let mut programs = vec!["cc"];
        programs.extend(all.iter().enumerate().filter(|(other, _)| *other != index).map(|(_, name)| *name));
        assert_eq!(missing(&Fake { libclang: true, ..bare(&programs) }, Tool::BUILD), [tool]);
    }
    assert_eq!(missing(&bare(&["c++", "cc", "make", "cmake", "python3"]), Tool::BUILD), [Tool::Libclang]);
}

#[test]
fn variables_name_other_tools() {
    let machine = Fake {
        libclang: true,
        variables: vec![("CXX", "clang++"), ("CMAKE_GENERATOR", "Ninja"), ("CMAKE", "cmake3")],
        ..bare(&["clang++", "cmake3", "python3"])
    };
    assert_eq!(missing(&machine, Tool::BUILD), []);
    let machine = Fake { variables: vec![("CXX", "no-such-compiler")], ..bare(&["c++", "cc"]) };
    assert!(missing(&machine, Tool::BUILD).contains(&Tool::Compiler));
}

#[test]
fn the_systems_python_serves_when_the_first_one_has_no_pip() {
    assert_eq!(find_python(&bare(&["/usr/bin/python3"])), Some(["/usr/bin/python3"].as_slice()));
    assert_eq!(find_python(&bare(&[])), None);
    let windows = Fake { os: "windows", ..bare(&["py"]) };
    assert_eq!(find_python(&windows), Some(["py", "-3"].as_slice()));
}

#[test]
fn root_installs_what_is_missing_and_nothing_else() {
    let machine = Fake { root: true, ..bare(&["c++", "cc", "make", "apt-get"]) };
    let Plan::Install(commands) = Plan::new(&machine, &missing(&machine, Tool::BUILD)) else {
        panic!("root on Debian can install");
    };
    let lines: Vec<_> = commands.iter().map(|words| words.join(" ")).collect();
    assert_eq!(lines.len(), 2);
    assert!(lines[0].ends_with("update"), "{}", lines[0]);
    assert!(lines[1].starts_with("env DEBIAN_FRONTEND=noninteractive apt-get"), "{}", lines[1]);
    assert!(lines[1].ends_with("--no-install-recommends cmake libclang-dev python3-pip"), "{}", lines[1]);
}

#[test]
fn sudo_is_used_only_without_a_password() {
    let machine = bare(&["dnf", "sudo"]);
    let sudo = Plan::new(&machine, &[Tool::CMake]);
    let words = ["sudo", "-n", "dnf", "install", "-y", "cmake"].map(str::to_owned).to_vec();
    assert_eq!(sudo, Plan::Install(vec![words]));

    let machine = bare(&["dnf"]);
    let told = Plan::new(&machine, &[Tool::CMake, Tool::Libclang]);
    assert_eq!(told, Plan::Tell("sudo dnf install -y cmake clang-devel".to_owned()));
    let text = told.text(&[Tool::CMake, Tool::Libclang]);
    assert!(text.contains("CMake (llama.cpp is built with it)"), "{text}");
    assert!(text.ends_with("this installs it: sudo dnf install -y cmake clang-devel"), "{text}");
}

#[test]
fn where_set_up_may_not_install_it_prints_one_line() {
    let debian = bare(&["apt-get"]);
    let Plan::Tell(line) = Plan::new(&debian, &[Tool::CMake, Tool::Pip]) else { panic!("no rights here") };
    assert!(line.starts_with("sudo apt-get") && line.contains(" update && sudo apt-get"), "{line}");
    assert!(line.ends_with(" cmake python3-pip") && !line.contains('\n'), "{line}");

    let mac = Fake { os: "macos", ..bare(&["brew"]) };
    assert_eq!(Plan::new(&mac, &[Tool::Compiler]), Plan::Tell("xcode-select --install".to_owned()));
    let brew = ["brew", "install", "cmake"].map(str::to_owned).to_vec();
    assert_eq!(Plan::new(&mac, &[Tool::CMake]), Plan::Install(vec![brew.clone()]));
    let told = Plan::Install(vec![brew]).unless(true);
    assert_eq!(told, Plan::Tell("brew install cmake".to_owned()));

    let windows = Fake { os: "windows", ..bare(&["winget"]) };
    let Plan::Tell(line) = Plan::new(&windows, &[Tool::CMake, Tool::Libclang]) else {
        panic!("Windows asks")
    };
    assert_eq!(line, "winget install --exact --id Kitware.CMake; winget install --exact --id LLVM.LLVM");
}

#[test]
fn a_machine_without_a_package_manager_hears_what_is_missing() {
    let plan = Plan::new(&bare(&[]), &[Tool::Pip]);
    assert_eq!(plan, Plan::Unknown);
    let text = plan.text(&[Tool::Pip]);
    assert!(text.contains("Python 3 with pip") && text.contains("no package manager"), "{text}");
}
