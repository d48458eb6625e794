//! Finds libclang where bindgen, which reads llama.cpp's headers with it, will look for it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::sh;

/// The folders that bindgen tries in the end, as patterns.
const FOLDERS: &[&str] = if cfg!(target_os = "windows") {
    &[
        r"C:\Program Files*\LLVM\bin",
        r"C:\LLVM\bin",
        r"C:\Users\*\scoop\apps\llvm\current\bin",
        r"C:\Program Files*\Microsoft Visual Studio\*\*\VC\Tools\Llvm\x64\bin",
    ]
} else if cfg!(target_os = "macos") {
    &[
        "/Library/Developer/CommandLineTools/usr/lib",
        "/Applications/Xcode.app/Contents/Developer/Toolchains/XcodeDefault.xctoolchain/usr/lib",
        "/usr/local/opt/llvm*/lib",
    ]
} else {
    &[
        "/usr/local/llvm*/lib*",
        "/usr/local/lib*/*/*",
        "/usr/local/lib*/*",
        "/usr/local/lib*",
        "/usr/lib*/*/*",
        "/usr/lib*/*",
        "/usr/lib*",
    ]
};

const FILES: &[&str] = if cfg!(target_os = "windows") {
    &["libclang.dll", "clang.dll"]
} else if cfg!(target_os = "macos") {
    &["libclang.dylib"]
} else {
    &["libclang.so", "libclang-*.so", "libclang.so.*", "libclang-*.so.*"]
};

/// The libclang that can be used: the library, and on Linux, where packages part them, its own headers with it.
pub(super) fn find() -> Option<PathBuf> {
    // bindgen looks nowhere else when this variable is set; it may name the file or its folder.
    if let Some(path) = env::var_os("LIBCLANG_PATH").map(PathBuf::from) {
        let folder = if path.is_file() { path.parent()?.to_owned() } else { path };
        return library_in(&folder.to_string_lossy());
    }
    let mut folders: Vec<String> = Vec::new();
    let llvm_config = env::var("LLVM_CONFIG_PATH").unwrap_or_else(|_| "llvm-config".to_owned());
    if let Some(prefix) = answer(&llvm_config, "--prefix") {
        folders.extend(["lib", "lib64", "bin"].map(|folder| format!("{prefix}/{folder}")));
    }
    if cfg!(target_os = "macos") {
        let developer = answer("xcode-select", "--print-path");
        folders.extend(developer.map(|path| format!("{path}/Toolchains/XcodeDefault.xctoolchain/usr/lib")));
    }
    for variable in ["LD_LIBRARY_PATH", "LIBRARY_PATH"] {
        let paths = env::var_os(variable).unwrap_or_default();
        folders.extend(env::split_paths(&paths).map(|path| path.to_string_lossy().into_owned()));
    }
    folders.extend(FOLDERS.iter().map(|&folder| folder.to_owned()));
    let library = folders.iter().filter(|folder| !folder.is_empty()).find_map(|folder| library_in(folder))?;
    (!cfg!(target_os = "linux") || has_headers(&library)).then_some(library)
}

/// The first libclang in the folders that a pattern names.
fn library_in(folder: &str) -> Option<PathBuf> {
    let patterns = FILES.iter().map(|file| format!("{folder}/{file}"));
    let paths = patterns.filter_map(|pattern| glob::glob(&pattern).ok()).flatten().flatten();
    // `libclang-cpp` is another library.
    paths.into_iter().find(|path| path.is_file() && !path.to_string_lossy().contains("-cpp."))
}

/// Whether clang's own headers, such as `stddef.h`, are installed: without a compiler beside it libclang has none.
fn has_headers(library: &Path) -> bool {
    let beside = library.parent().unwrap_or(Path::new("/"));
    let patterns = [
        format!("{}/clang/*/include/stddef.h", beside.display()),
        format!("{}/../lib/clang/*/include/stddef.h", beside.display()),
        "/usr/lib*/clang/*/include/stddef.h".to_owned(),
        "/usr/lib*/llvm*/lib*/clang/*/include/stddef.h".to_owned(),
        "/usr/local/lib*/clang/*/include/stddef.h".to_owned(),
    ];
    let found = |pattern: &String| glob::glob(pattern).is_ok_and(|mut paths| paths.any(|path| path.is_ok()));
    sh::answers("clang", &["--version"]) || patterns.iter().any(found)
}

fn answer(program: &str, argument: &str) -> Option<String> {
    let output =
        Command::new(program).arg(argument).output().ok().filter(|output| output.status.success())?;
    let line = String::from_utf8_lossy(&output.stdout).lines().next()?.trim().to_owned();
    (!line.is_empty()).then_some(line)
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_library_is_told_from_its_neighbours() {
        let folder = env::temp_dir().join(format!("xtask-libclang-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for the test");
        let pattern = folder.to_string_lossy().into_owned();
        let suffix = if cfg!(target_os = "macos") { "dylib" } else { "so" };
        fs::write(folder.join(format!("libclang-cpp.{suffix}")), "").expect("a file");
        assert_eq!(library_in(&pattern), None);
        let library = folder.join(format!("libclang.{suffix}"));
        fs::write(&library, "").expect("a file");
        assert_eq!(library_in(&pattern), Some(library));
        fs::remove_dir_all(&folder).expect("the test's own folder");
    }
}
