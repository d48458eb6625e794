//! The project's own rules, which no lint knows.

use std::fs;
use std::path::Path;

use crate::{Result, sh};

/// A file has one subject, and this many lines at most.
const MAX_LINES: usize = 500;
/// Files that may be longer, each with its reason.
const LONG_FILES: &[(&str, &str)] = &[];
/// Where unsafe code may be; a folder ends with a slash.
const UNSAFE_PLACES: &[&str] = &[
    "crates/engine/src/llama/",
    "crates/engine/tests/allocations.rs",
    "crates/engine-cxx/src/bridge.rs",
    "benches/benches/bridge.rs",
    "crates/engine-bench/src/raw.rs",
    "fixtures/tests/",
    "fixtures/src/shapes.rs",
];
/// What is not ours to check, wherever it is.
const SKIPPED_FOLDERS: &[&str] = &[".git", "target", "cache", "dist", "node_modules", "runs"];
const CHECKED: &[&str] =
    &["rs", "h", "hpp", "cc", "cpp", "py", "mjs", "js", "sh", "cmake", "toml", "yml", "md"];

pub(crate) fn run() -> Result {
    let faults = check_tree(sh::root())?;
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n").into()) }
}

fn check_tree(root: &Path) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let (path, name) = (entry.path(), entry.file_name());
            if entry.file_type()?.is_dir() {
                if !SKIPPED_FOLDERS.iter().any(|skipped| name == *skipped) {
                    folders.push(path);
                }
                continue;
            }
            if CHECKED.iter().any(|kind| path.extension().is_some_and(|extension| extension == *kind)) {
                let shown = path.strip_prefix(root)?.to_string_lossy().replace('\\', "/");
                let text = fs::read_to_string(&path).map_err(|error| format!("{shown}: {error}"))?;
                check_file(&shown, &text, &mut faults);
            }
        }
    }
    faults.sort();
    Ok(faults)
}

fn check_file(path: &str, text: &str, faults: &mut Vec<String>) {
    let kind = path.rsplit('.').next().unwrap_or_default();
    let lines = text.lines().count();
    let may_be_long = kind == "md" || LONG_FILES.iter().any(|(long, _)| *long == path);
    if lines > MAX_LINES && !may_be_long {
        faults.push(format!("{path}: {lines} lines, {MAX_LINES} at most: part it by subject"));
    }
    let may_be_unsafe = UNSAFE_PLACES.iter().any(|place| path.starts_with(place));
    for (index, line) in text.lines().enumerate() {
        let at = format!("{path}:{}", index + 1);
        if kind == "rs" && !may_be_unsafe && has_unsafe_code(line) {
            faults.push(format!("{at}: unsafe code has no place here, but in {}", UNSAFE_PLACES.join(", ")));
        }
        if names_a_home(line) {
            faults.push(format!("{at}: a path of somebody's machine"));
        }
        if line.ends_with([' ', '\t']) && kind != "md" {
            faults.push(format!("{at}: white space at the end of the line"));
        }
    }
}

fn has_unsafe_code(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let mut after = code.split("unsafe ").skip(1);
    after.any(|rest| ["{", "fn ", "impl", "extern", "trait "].iter().any(|begin| rest.starts_with(begin)))
}

/// Whether a line has a path below a home folder, such as a model of whoever wrote it.
fn names_a_home(line: &str) -> bool {
    ["home", "Users", "root"].iter().any(|home| {
        let folder = format!("/{home}/");
        line.split(&folder)
            .skip(1)
            .any(|rest| rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '.'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(path: &str, text: &str) -> Vec<String> {
        let mut faults = Vec::new();
        check_file(path, text, &mut faults);
        faults
    }

    #[test]
    fn long_files_are_found() {
        assert_eq!(faults("a.rs", &"x\n".repeat(MAX_LINES)), Vec::<String>::new());
        assert_eq!(faults("a.rs", &"x\n".repeat(MAX_LINES + 1)).len(), 1);
        assert_eq!(faults("a.md", &"x\n".repeat(MAX_LINES + 1)), Vec::<String>::new());
    }

    #[test]
    fn unsafe_code_is_found_outside_its_places() {
        // Spelt in two parts, so that this file does not have it.
        let code = concat!("let x = unsafe", " { y };");
        assert_eq!(faults("crates/engine/src/kv.rs", code).len(), 1);
        assert_eq!(faults("crates/engine/src/llama/context.rs", code), Vec::<String>::new());
        assert_eq!(faults("crates/engine/src/kv.rs", &format!("// {code}")), Vec::<String>::new());
        assert_eq!(faults("crates/engine/src/kv.rs", "unsafe_op = \"deny\""), Vec::<String>::new());
    }

    #[test]
    fn paths_of_a_machine_and_trailing_space_are_found() {
        assert_eq!(faults("a.toml", concat!("model = \"/ho", "me/me/model.gguf\"")).len(), 1);
        assert_eq!(faults("a.toml", "x = 1 ").len(), 1);
    }

    #[test]
    fn the_tree_is_tidy() {
        assert_eq!(check_tree(sh::root()).expect("the tree can be read"), Vec::<String>::new());
    }
}
