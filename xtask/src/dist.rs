//! The install tree for C++ hosts: header, static and shared library, CMake package, pkg-config file, licences.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::{Result, setup, sh, test};

/// The shared library's ABI: raised when a host has to be compiled anew.
const ABI: u32 = 0;
const CRATE: &str = "crates/engine-cxx";
const STATIC: &str = "libCotabbyInference.a";
const PKG_CONFIG: &str = "CotabbyInference.pc";
/// What every exported symbol begins with: a member of the class, mangled; macOS puts an underscore in front.
const EXPORTED: [&str; 2] = ["_ZN22CotabbyInferenceEngine", "_ZNK22CotabbyInferenceEngine"];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where the tree goes
    #[arg(long, value_name = "DIR")]
    prefix: PathBuf,
    /// What llama.cpp is built with: metal, openmp
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    features: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result {
    setup::run(&setup::Args::default())?;
    let build = test::Args { features: args.features.clone(), ..test::Args::default() };
    install(&sh::absolute(&args.prefix), &build)
}

/// Builds everything, and writes the tree.
pub(crate) fn install(prefix: &Path, args: &test::Args) -> Result {
    let archive = build(args)?;
    let (include, lib) = (prefix.join("include"), prefix.join("lib"));
    let cmake = lib.join("cmake/CotabbyInference");
    for folder in [&include, &cmake, &lib.join("pkgconfig")] {
        fs::create_dir_all(folder)?;
    }
    let source = sh::root().join(CRATE);
    for header in ["CotabbyInferenceEngine.h", "module.modulemap"] {
        fs::copy(source.join("include").join(header), include.join(header))?;
    }
    fs::copy(&archive, lib.join(STATIC))?;
    let shared = link_shared(&archive, &lib)?;
    check_exports(&shared)?;

    let fill = |from: &str, to: &Path| -> Result {
        let text = fs::read_to_string(source.join("cmake").join(from))?;
        let separator = if from == PKG_CONFIG { " " } else { ";" };
        let text = text
            .replace("@VERSION@", env!("CARGO_PKG_VERSION"))
            .replace("@SHARED@", &shared.file_name().unwrap_or_default().to_string_lossy())
            .replace("@STATIC@", STATIC)
            .replace("@LIBRARIES@", &libraries().join(separator));
        Ok(fs::write(to.join(from), text)?)
    };
    fill("CotabbyInferenceConfig.cmake", &cmake)?;
    fill("CotabbyInferenceConfigVersion.cmake", &cmake)?;
    fill(PKG_CONFIG, &lib.join("pkgconfig"))?;
    licences(&prefix.join("share/licenses/CotabbyInference"))?;
    eprintln!("dist: {}", prefix.display());
    Ok(())
}

/// Builds the archive with everything in it, as the workspace's other steps build the crates, so that nothing is built
/// twice.
pub(crate) fn build(args: &test::Args) -> Result<PathBuf> {
    if cfg!(windows) {
        return Err("the C++ libraries can be built on Linux and macOS only".into());
    }
    sh::run(&mut test::workspace(args, &["build", "--lib"]))?;
    Ok(sh::programs()?.join("libengine_cxx.a"))
}

/// What a program that links the archive needs besides the C++ library: what rustc lists for it.
pub(crate) fn libraries() -> &'static [&'static str] {
    if cfg!(target_os = "macos") {
        &[
            "-framework Foundation",
            "-framework Metal",
            "-framework MetalKit",
            "-framework Accelerate",
            "-liconv",
            "-lm",
        ]
    } else {
        &["-lpthread", "-ldl", "-lrt", "-lutil", "-lm"]
    }
}

/// The C++ compiler that the user names, or the system's.
pub(crate) fn cxx() -> String {
    std::env::var("CXX").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| "c++".to_owned())
}

fn link_shared(archive: &Path, lib: &Path) -> Result<PathBuf> {
    let exports = sh::root().join(CRATE).join("cmake");
    let macos = cfg!(target_os = "macos");
    let (full, link) = if macos {
        (format!("libCotabbyInference.{ABI}.dylib"), "libCotabbyInference.dylib")
    } else {
        (format!("libCotabbyInference.so.{ABI}"), "libCotabbyInference.so")
    };
    let shared = lib.join(&full);
    let mut command = Command::new(cxx());
    command.arg("-o").arg(&shared);
    if macos {
        let list = exports.join("exports.txt");
        command.args(["-dynamiclib", "-install_name", &format!("@rpath/{full}"), "-Wl,-dead_strip"]);
        command.arg(format!("-Wl,-exported_symbols_list,{}", list.display()));
        command.arg(format!("-Wl,-force_load,{}", archive.display()));
    } else {
        let map = exports.join("exports.map");
        command.args(["-shared", &format!("-Wl,-soname,{full}"), "-Wl,--gc-sections", "-Wl,--no-undefined"]);
        command.arg("-Wl,--strip-debug").arg(format!("-Wl,--version-script={}", map.display()));
        command.arg("-Wl,--whole-archive").arg(archive).arg("-Wl,--no-whole-archive");
    }
    command.args(libraries().iter().flat_map(|item| item.split(' ')));
    sh::run(&mut command)?;
    let link = lib.join(link);
    if link.symlink_metadata().is_ok() {
        fs::remove_file(&link)?;
    }
    symlink(&full, &link)?;
    Ok(shared)
}

#[cfg(unix)]
fn symlink(to: &str, link: &Path) -> Result {
    Ok(std::os::unix::fs::symlink(to, link)?)
}

#[cfg(not(unix))]
fn symlink(_: &str, _: &Path) -> Result {
    Err("there are no symbolic links on this system".into())
}

/// The shared library exports the class, and nothing of llama.cpp, ggml or Rust.
fn check_exports(shared: &Path) -> Result {
    let flags = if cfg!(target_os = "macos") { ["-g", "-U"] } else { ["-D", "--defined-only"] };
    let output = Command::new("nm").args(flags).arg(shared).output()?;
    if !output.status.success() {
        return Err(format!("nm cannot read {}", shared.display()).into());
    }
    let symbols = String::from_utf8_lossy(&output.stdout);
    let foreign = foreign_exports(&symbols);
    if foreign.is_empty() {
        return Ok(());
    }
    Err(format!("{} exports what it should not: {}", shared.display(), foreign.join(", ")).into())
}

fn foreign_exports(nm: &str) -> Vec<&str> {
    let symbols: Vec<_> = nm.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    if symbols.is_empty() {
        return vec!["no symbol at all"];
    }
    let own = |symbol: &&str| {
        let plain = symbol.strip_prefix('_').filter(|rest| rest.starts_with('_')).unwrap_or(symbol);
        EXPORTED.iter().any(|begin| plain.starts_with(begin))
    };
    symbols.into_iter().filter(|symbol| !own(symbol)).collect()
}

/// The project's licence texts, and those of everything that is linked in.
fn licences(to: &Path) -> Result {
    fs::create_dir_all(to)?;
    for own in ["LICENSE-MIT", "LICENSE-APACHE"] {
        fs::copy(sh::root().join(own), to.join(own)).map_err(|error| format!("{own}: {error}"))?;
    }
    let tree = ["tree", "--package", "engine-cxx", "--edges", "normal,no-proc-macro", "--prefix", "none"];
    let tree = text_of(sh::cargo().args(tree).args(["--format", "{p}"]))?;
    let metadata = text_of(sh::cargo().args(["metadata", "--format-version", "1"]))?;
    let metadata: Value = serde_json::from_str(&metadata)?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?;
    let mut list = String::new();
    for package in packages {
        let word = |key: &str| package[key].as_str().unwrap_or_default();
        let id = format!("{} v{}", word("name"), word("version"));
        // What has no source is a crate of this workspace.
        if package["source"].is_null()
            || !tree.lines().any(|line| line == id || line.starts_with(&format!("{id} ")))
        {
            continue;
        }
        let _ = writeln!(list, "{id}: {}", word("license"));
        let folder = Path::new(word("manifest_path")).parent().unwrap_or(Path::new(""));
        copy_texts(folder, &to.join(format!("{}-{}", word("name"), word("version"))))?;
        if word("name") == "llama-cpp-sys-2"
            && copy_texts(&folder.join("llama.cpp"), &to.join("llama.cpp"))? == 0
        {
            return Err("llama.cpp's licence text is not in llama-cpp-sys-2".into());
        }
    }
    Ok(fs::write(to.join("THIRD-PARTY.txt"), list)?)
}

fn text_of(command: &mut Command) -> Result<String> {
    let output = command.output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// How many licence texts there were.
fn copy_texts(from: &Path, to: &Path) -> Result<usize> {
    let mut copied = 0;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() && is_licence(&entry.file_name()) {
            fs::create_dir_all(to)?;
            fs::copy(entry.path(), to.join(entry.file_name()))?;
            copied += 1;
        }
    }
    Ok(copied)
}

fn is_licence(name: &OsStr) -> bool {
    let name = name.to_string_lossy().to_uppercase();
    ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"].iter().any(|begin| name.starts_with(begin))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symbol_of_anybody_else_is_found() {
        let class = "0000000000017650 T _ZN22CotabbyInferenceEngine10sampleNextEi\n";
        assert_eq!(foreign_exports(class), Vec::<&str>::new());
        assert_eq!(
            foreign_exports("1 T __ZNK22CotabbyInferenceEngine13isModelLoadedEv\n"),
            Vec::<&str>::new()
        );
        assert_eq!(foreign_exports(&format!("{class}0001 T llama_decode\n")), ["llama_decode"]);
        assert_eq!(foreign_exports("1 T _ZN5otherE\n2 W _ggml_abort\n"), ["_ZN5otherE", "_ggml_abort"]);
        assert_eq!(foreign_exports(""), ["no symbol at all"]);
    }
}
