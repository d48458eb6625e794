//! The C++ API's checks: the header under every standard and compiler, the contract's tests and a random load with each
//! model, and the install tree with the examples that use it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ::fixtures::{SmallModel, manifest, small};

use crate::{Result, dist, sanitize, sh, test};

const STANDARDS: [&str; 3] = ["c++17", "c++20", "c++2b"];
const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];
/// Prompts of the example, and so lines that it prints for them.
const COMPLETIONS: usize = 4;

/// A step of `cargo xtask test`.
pub(crate) fn test(args: &test::Args) -> Result {
    if cfg!(windows) {
        eprintln!("cxx: not run, the C++ libraries can be built on Linux and macOS only");
        return Ok(());
    }
    headers()?;
    let archive = dist::build(args)?;
    contract(&archive)?;
    sanitize::adapter(&archive)?;
    examples(args)
}

/// Where the crate is.
pub(crate) fn source() -> PathBuf {
    sh::root().join("crates/engine-cxx")
}

/// A folder for the C++ builds, below cargo's.
pub(crate) fn folder(name: &str) -> Result<PathBuf> {
    let programs = sh::programs()?;
    let target = programs.parent().ok_or("cargo's target directory has no path")?;
    Ok(target.join("cxx").join(name))
}

/// The header alone, and what hosts do with it.
fn headers() -> Result {
    // Apple's g++ is clang.
    let compilers: &[&str] = if cfg!(target_os = "macos") { &["clang++"] } else { &["g++", "clang++"] };
    for compiler in compilers {
        for standard in STANDARDS {
            for file in ["include/CotabbyInferenceEngine.h", "tests/source_compat.cc"] {
                let mut command = Command::new(compiler);
                command.arg(format!("-std={standard}")).args(WARNINGS).args(["-fsyntax-only", "-x", "c++"]);
                sh::run(command.arg("-I").arg(source().join("include")).arg(source().join(file)))?;
            }
        }
    }
    Ok(())
}

/// The small models, and the real one that the Rust tests use as well.
fn models() -> Result<Vec<PathBuf>> {
    let mut models: Vec<_> = SmallModel::ALL.iter().map(|model| small(*model)).collect();
    models.push(manifest::test_model()?);
    Ok(models)
}

fn configure(source: &Path, build: &Path, options: &[String]) -> Result {
    let mut command = Command::new("cmake");
    command.arg("-S").arg(source).arg("-B").arg(build).arg("-DCMAKE_BUILD_TYPE=Release");
    sh::run(command.args(options))?;
    sh::run(Command::new("cmake").arg("--build").arg(build).args(["--parallel", "2"]))
}

fn contract(archive: &Path) -> Result {
    let models: Vec<_> = models()?.iter().map(|model| model.display().to_string()).collect();
    let build = folder("contract")?;
    let options = [
        format!("-DCOTABBY_INFERENCE_ARCHIVE={}", archive.display()),
        "-DCOTABBY_INFERENCE_TESTS=ON".to_owned(),
        format!("-DCOTABBY_TEST_MODELS={}", models.join(";")),
    ];
    configure(&source(), &build, &options)?;
    let mut command = Command::new("ctest");
    sh::run(command.arg("--test-dir").arg(&build).args(["--output-on-failure", "--no-tests=error"]))
}

/// A folder that was emptied, so that the examples see the install tree and nothing else.
fn empty(name: &str) -> Result<PathBuf> {
    let folder = folder(name)?;
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

fn examples(args: &test::Args) -> Result {
    let prefix = empty("prefix")?;
    dist::install(&prefix, args)?;
    let hosts = empty("hosts")?;
    for file in ["complete.cc", "find_package/CMakeLists.txt", "pkg_config/Makefile"] {
        let to = hosts.join(file);
        fs::create_dir_all(to.parent().unwrap_or(&hosts))?;
        fs::copy(source().join("examples").join(file), to)?;
    }

    for linkage in ["shared", "static"] {
        let build = hosts.join(linkage);
        let options = [
            format!("-DCMAKE_PREFIX_PATH={}", prefix.display()),
            format!("-DCOTABBY_INFERENCE_STATIC={}", if linkage == "static" { "ON" } else { "OFF" }),
        ];
        configure(&hosts.join("find_package"), &build, &options)?;
        complete(&build.join("complete"))?;
    }

    let packages = prefix.join("lib/pkgconfig");
    let mut make = Command::new("make");
    make.arg("-C").arg(hosts.join("pkg_config")).arg(format!("PKG_CONFIG_PATH={}", packages.display()));
    sh::run(&mut make)?;
    complete(&hosts.join("pkg_config/complete"))?;

    let build = hosts.join("fetch_content");
    let options = [
        format!("-DFETCHCONTENT_SOURCE_DIR_COTABBYINFERENCE={}", sh::root().display()),
        // With the archive that is there, because cargo would build one crate with other features than the workspace.
        format!("-DCOTABBY_INFERENCE_ARCHIVE={}", sh::programs()?.join("libengine_cxx.a").display()),
    ];
    configure(&source().join("examples/fetch_content"), &build, &options)?;
    complete(&build.join("complete"))
}

/// Runs an example and counts its completions.
fn complete(program: &Path) -> Result {
    let model = manifest::test_model()?;
    eprintln!("$ {} {}", program.display(), model.display());
    let output = Command::new(program).arg(&model).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    eprint!("{text}");
    let completions =
        text.lines().filter_map(|line| line.split_once('|')).filter(|(_, text)| !text.is_empty());
    if output.status.success() && completions.count() == COMPLETIONS {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("{} did not print {COMPLETIONS} completions: {}, {errors}", program.display(), output.status)
        .into())
}
