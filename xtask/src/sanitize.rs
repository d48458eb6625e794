//! The C++ tests under the sanitizers.
//!
//! `cargo xtask sanitize` instruments everything: llama.cpp, the Rust crates, the adapter and the tests, in a target
//! directory of its own for each sanitizer; the first run builds llama.cpp for each. Rust's standard library comes
//! precompiled: `AddressSanitizer` sees its allocations all the same, and `tests/tsan_std.cc` tells `ThreadSanitizer` what it
//! synchronizes. valgrind looks at what is there, with nothing built anew. A step of `cargo xtask test` instruments the
//! adapter and the tests only.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ::fixtures::{SmallModel, small};

use crate::{Result, cxx, dist, setup, sh, test};

/// Test programs, and what they are made of.
const CONTRACT: &[&str] = &[
    "main.cc",
    "without_model.cc",
    "loading.cc",
    "text.cc",
    "completion.cc",
    "sampling.cc",
    "concurrency.cc",
];
const STRESS: &[&str] = &["stress.cc"];
/// Threads of the random load.
const THREADS: &str = "8";
/// Seconds of the random load in `cargo xtask test`.
const SHORT_SECONDS: u32 = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Sanitizer {
    /// `AddressSanitizer`, with `UndefinedBehaviorSanitizer` for the C++ code
    Address,
    /// `ThreadSanitizer`
    Thread,
    /// valgrind's memcheck
    Valgrind,
}

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which to run
    #[arg(value_enum, default_values_t = [Sanitizer::Address, Sanitizer::Thread])]
    sanitizers: Vec<Sanitizer>,
    /// Seconds of random load for each seed and small model
    #[arg(long, value_name = "N", default_value_t = 30)]
    seconds: u32,
    /// Seeds of the random load; with an even one ggml has threads of its own
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_values_t = [1, 2])]
    seeds: Vec<u32>,
}

pub(crate) fn run(args: &Args) -> Result {
    setup::run(&setup::Args::default())?;
    setup::for_cxx_tests()?;
    for sanitizer in &args.sanitizers {
        match sanitizer {
            Sanitizer::Address => instrumented(*sanitizer, "address", args)?,
            Sanitizer::Thread => instrumented(*sanitizer, "thread", args)?,
            Sanitizer::Valgrind => valgrind(args)?,
        }
    }
    Ok(())
}

/// The adapter and the tests under `AddressSanitizer` and `UndefinedBehaviorSanitizer`, on the archive as it is.
pub(crate) fn adapter(archive: &Path) -> Result {
    let bridge = cxx::folder("")?.join("../cxxbridge");
    let flags = Flags { compiler: dist::cxx(), ..Flags::address() };
    let stress = link("adapter", STRESS, &flags, &bridge, archive)?;
    load(&stress, SmallModel::ALL[0], SHORT_SECONDS, 1)
}

/// How the C++ side is compiled, and what is linked besides.
struct Flags {
    compiler: String,
    compile: Vec<OsString>,
    /// Sources that are not instrumented.
    plain: Vec<PathBuf>,
    link: Vec<OsString>,
}

impl Flags {
    fn address() -> Self {
        let sanitize: OsString = "-fsanitize=address,undefined".into();
        let compile = vec![sanitize.clone(), "-fno-sanitize-recover=undefined".into()];
        Self { compiler: "clang++".to_owned(), compile, plain: Vec::new(), link: vec![sanitize] }
    }

    /// Rust's own runtime is linked, because the system's may be older than what the Rust compiler emits.
    fn thread(archive: &Path, host: &str) -> Result<Self> {
        let runtime = runtime(host)?;
        let mut compile = Vec::new();
        let mut link: Vec<OsString> = vec!["-Wl,--wrap=__tsan_atomic64_fetch_sub".into()];
        for (name, symbol) in std_locks(archive)? {
            compile.push(format!("-D{name}={symbol}").into());
            link.push(format!("-Wl,--wrap={symbol}").into());
        }
        link.push("-Wl,--whole-archive".into());
        link.push(runtime.into());
        link.extend(["-Wl,--no-whole-archive", "-lresolv"].map(OsString::from));
        let plain = vec![cxx::source().join("tests/tsan_std.cc")];
        compile.push("-fsanitize=thread".into());
        Ok(Self { compiler: "clang++".to_owned(), compile, plain, link })
    }
}

fn instrumented(sanitizer: Sanitizer, name: &str, args: &Args) -> Result {
    if !cfg!(target_os = "linux") {
        return Err("the sanitizers are set up for Linux only".into());
    }
    let host = host()?;
    let target = cxx::folder(name)?;
    let native = format!("-fsanitize={name} -g1 -fno-omit-frame-pointer");
    let rust = format!(
        "-Zsanitizer={name} -Cdebuginfo=1 -Cforce-frame-pointers -Cunsafe-allow-abi-mismatch=sanitizer"
    );
    let mut command = sh::cargo();
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", rust).env("CC", "clang").env("CXX", "clang++");
    command.env("CFLAGS", &native).env("CXXFLAGS", &native);
    command.args(["build", "--release", "--package", "engine-cxx", "--lib", "--target", &host]);
    sh::run(command.arg("--target-dir").arg(&target))?;

    let built = target.join(&host);
    let archive = built.join("release/libengine_cxx.a");
    let flags = match sanitizer {
        Sanitizer::Thread => Flags::thread(&archive, &host)?,
        _ => Flags::address(),
    };
    let bridge = built.join("cxxbridge");
    let contract = link(&format!("contract-{name}"), CONTRACT, &flags, &bridge, &archive)?;
    let stress = link(&format!("stress-{name}"), STRESS, &flags, &bridge, &archive)?;
    for model in SmallModel::ALL {
        sh::run(Command::new(&contract).env("COTABBY_TEST_MODEL_PATH", small(model)))?;
        for seed in &args.seeds {
            load(&stress, model, args.seconds, *seed)?;
        }
    }
    Ok(())
}

fn valgrind(args: &Args) -> Result {
    let archive = dist::build(&test::Args::default())?;
    let bridge = cxx::folder("")?.join("../cxxbridge");
    let flags =
        Flags { compiler: dist::cxx(), compile: vec!["-g".into()], plain: Vec::new(), link: Vec::new() };
    let stress = link("stress-valgrind", STRESS, &flags, &bridge, &archive)?;
    for model in SmallModel::ALL {
        for seed in &args.seeds {
            let mut command = Command::new("valgrind");
            command
                .args(["--quiet", "--error-exitcode=9", "--fair-sched=yes"])
                .arg(&stress)
                .arg(small(model));
            sh::run(command.args([&args.seconds.to_string(), &seed.to_string(), THREADS]))?;
        }
    }
    Ok(())
}

/// Runs the random load.
fn load(stress: &Path, model: SmallModel, seconds: u32, seed: u32) -> Result {
    let numbers = [seconds.to_string(), seed.to_string(), THREADS.to_owned()];
    sh::run(Command::new(stress).arg(small(model)).args(numbers))
}

/// Links a test program. The adapter is compiled with it, and so is instrumented too; that in the archive stays out.
fn link(name: &str, sources: &[&str], flags: &Flags, bridge: &Path, archive: &Path) -> Result<PathBuf> {
    let folder = cxx::folder("sanitized")?;
    fs::create_dir_all(&folder)?;
    let mut objects = Vec::new();
    let compile = |source: &Path, instrument: bool| -> Result<PathBuf> {
        let object =
            folder.join(format!("{name}-{}.o", source.file_stem().unwrap_or_default().to_string_lossy()));
        let mut command = Command::new(&flags.compiler);
        command.args(["-std=c++17", "-O1", "-g", "-c"]).arg(source).arg("-o").arg(&object);
        command.arg("-I").arg(cxx::source().join("include")).arg("-I").arg(bridge).args(&flags.compile);
        if !instrument {
            command.arg("-fno-sanitize=all");
        }
        sh::run(&mut command)?;
        Ok(object)
    };
    let tests = sources.iter().map(|source| cxx::source().join("tests").join(source));
    for source in tests.chain([cxx::source().join("src/CotabbyInferenceEngine.cc")]) {
        objects.push(compile(&source, true)?);
    }
    for source in &flags.plain {
        objects.push(compile(source, false)?);
    }
    let program = folder.join(name);
    let mut command = Command::new(&flags.compiler);
    command.args(objects).arg(archive).args(&flags.link);
    sh::run(command.args(dist::libraries().iter().flat_map(|item| item.split(' '))).arg("-o").arg(&program))?;
    Ok(program)
}

/// The standard library's functions that `tests/tsan_std.cc` wraps, by the names that it has for them, and how their
/// mangled names end. The last two are there only if something waits on a condition variable.
const STD_LOCKS: [(&str, &str, bool); 6] = [
    ("MUTEX_LOCK", "5mutex5futexNtB2_5Mutex14lock_contended", true),
    ("RWLOCK_READ", "6rwlock5futexNtB2_6RwLock14read_contended", true),
    ("RWLOCK_WRITE", "6rwlock5futexNtB2_6RwLock15write_contended", true),
    ("ONCE_CALL", "4once5futexNtB5_4Once4call", true),
    ("CONDVAR_WAIT", "7Condvar4wait", false),
    ("CONDVAR_WAIT_TIMEOUT", "7Condvar12wait_timeout", false),
];

fn std_locks(archive: &Path) -> Result<Vec<(&'static str, String)>> {
    let output = Command::new("nm").arg("--undefined-only").arg(archive).output()?;
    let symbols = String::from_utf8_lossy(&output.stdout);
    let symbols = || symbols.lines().filter_map(|line| line.split_whitespace().last());
    let mut found = Vec::new();
    for (name, end, always) in STD_LOCKS {
        match symbols().find(|symbol| symbol.ends_with(end)) {
            Some(symbol) => found.push((name, symbol.to_owned())),
            None if always => {
                return Err(
                    format!("this Rust's standard library has no function that ends with {end}").into()
                );
            }
            None => {}
        }
    }
    Ok(found)
}

fn host() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.ok_or("rustc does not say what it is for")?.to_owned())
}

fn runtime(host: &str) -> Result<PathBuf> {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output()?;
    let sysroot = String::from_utf8(output.stdout)?;
    let folder = Path::new(sysroot.trim()).join("lib/rustlib").join(host).join("lib");
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        if path.to_string_lossy().ends_with("_rt.tsan.a") {
            return Ok(path);
        }
    }
    Err(format!("there is no ThreadSanitizer runtime in {}", folder.display()).into())
}
