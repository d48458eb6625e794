//! The matrix of models, sequences and scenarios, run in interleaved order and kept with a report and its plots.

mod chart;
mod records;
mod report;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ::fixtures::manifest::Manifest;

use crate::{Result, fixtures, setup, sh, test};

/// Measured runs below which a median says little.
const ENOUGH_RUNS: usize = 5;
/// Scenarios whose subject is throughput.
const THROUGHPUT: [&str; 9] = [
    "b_shared_context_argmax",
    "b_shared_context_unsampled",
    "b_shared_context",
    "a_two_contexts",
    "a_two_contexts_shared_cores",
    "a_two_contexts_shared_cores_argmax",
    "p_phase1_loop",
    "c_engine_threaded",
    "d_engine_generate",
];
/// The others, which choose the number of sequences themselves or take all that are allowed.
const SPECIAL: [&str; 4] = ["prefill_interference", "typing_session", "cancel_latency", "churn"];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// GGUF files to run [default: the models of fixtures/manifest.toml, which are fetched]
    #[arg(long, value_name = "PATHS", value_delimiter = ',')]
    models: Vec<PathBuf>,
    /// Numbers of sequences
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_value = "1,2,4")]
    n: Vec<u32>,
    /// Scenarios [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    scenarios: Vec<String>,
    /// Measured runs of each, after one to warm up
    #[arg(long, value_name = "R", default_value_t = ENOUGH_RUNS as u32)]
    runs: u32,
    /// Where to keep the results [default: a folder in benches/runs, named by the date and the machine]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Make the report of lines that engine-bench printed elsewhere, and run nothing
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    report_from: Vec<PathBuf>,
    /// The day of the runs, for the report [default: today]
    #[arg(long, value_name = "YYYY-MM-DD")]
    date: Option<String>,
    /// Cargo features to build with, such as cuda, metal or vulkan
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    features: Vec<String>,
    /// Further flags for engine-bench
    #[arg(last = true)]
    flags: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result {
    let date = match &args.date {
        Some(date) => date.clone(),
        None => today()?,
    };
    let made_of = args.report_from.iter().map(|file| sh::absolute(file)).collect::<Vec<_>>();
    let (lines, latencies) = if made_of.is_empty() { measure(args)? } else { (read_all(&made_of)?, None) };
    let records = records::parse(&lines)?;
    let out = match &args.out {
        Some(out) => sh::absolute(out),
        None => sh::root().join("benches/runs").join(format!("{date}-{}", records.machine_slug())),
    };
    fs::create_dir_all(&out)?;
    fs::write(out.join("runs.jsonl"), &lines)?;
    if let Some(latencies) = latencies {
        move_files(&latencies, &out.join("latency"))?;
    }
    let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    report::write(&records, &out, &date, &format!("cargo xtask {command}"))?;
    eprintln!("report: {}", out.join("report.md").display());
    match records.failures.len() {
        0 => Ok(()),
        count => Err(format!("{count} runs failed; the report lists them").into()),
    }
}

/// Builds and runs engine-bench; what it printed, and the folder of its `.hgrm` files.
fn measure(args: &Args) -> Result<(String, Option<PathBuf>)> {
    setup::run(&setup::Args::default())?;
    let models = if args.models.is_empty() {
        Manifest::load()?.models.iter().map(fixtures::ensure).collect::<Result<Vec<_>>>()?
    } else {
        args.models.iter().map(|model| sh::absolute(model)).collect()
    };
    let mut build = sh::cargo();
    build.args(["build", "--release", "--workspace", "--bin", "engine-bench"]);
    build.arg("--features").arg(test::features(&args.features)).env("ENGINE_BENCH_COMMIT", commit());
    sh::run(&mut build)?;

    let wanted: Vec<&str> = if args.scenarios.is_empty() {
        THROUGHPUT.into_iter().chain(SPECIAL).collect()
    } else {
        args.scenarios.iter().map(String::as_str).collect()
    };
    let (special, throughput): (Vec<_>, Vec<_>) = wanted.into_iter().partition(|name| SPECIAL.contains(name));
    let most = args.n.iter().max().copied().ok_or("--n is empty")?;
    let latencies = sh::root().join("target/bench-latency");
    if latencies.exists() {
        fs::remove_dir_all(&latencies)?;
    }
    let mut lines = String::new();
    for (scenarios, numbers) in [(throughput, args.n.as_slice()), (special, &[most])] {
        if !scenarios.is_empty() {
            run_matrix(args, &models, &scenarios, numbers, &latencies, &mut lines)?;
        }
    }
    Ok((lines, Some(latencies)))
}

fn run_matrix(
    args: &Args,
    models: &[PathBuf],
    scenarios: &[&str],
    numbers: &[u32],
    latencies: &Path,
    lines: &mut String,
) -> Result {
    let program = sh::programs()?.join(format!("engine-bench{}", std::env::consts::EXE_SUFFIX));
    let mut command = Command::new(program);
    for model in models {
        command.arg("--model").arg(model);
    }
    let numbers = numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    command.args(["--scenario", &scenarios.join(","), "--num-sequences", &numbers]);
    command.args(["--repeat", &args.runs.to_string(), "--warmup", "1"]).arg("--hgrm").arg(latencies);
    command.args(&args.flags).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let stdout = child.stdout.take().ok_or("engine-bench has no standard output")?;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        // A line is long; how far it is says enough on a terminal.
        eprintln!("{}", line.split(",\"model\"").next().unwrap_or(&line));
        lines.push_str(&line);
        lines.push('\n');
    }
    // Failures are in the lines, and each ends up in the report.
    let status = child.wait()?;
    if status.success() || lines.contains("\"error\"") {
        return Ok(());
    }
    Err(format!("engine-bench failed: {status}").into())
}

fn read_all(files: &[PathBuf]) -> Result<String> {
    let mut lines = String::new();
    for file in files {
        let text = fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        lines.push_str(text.trim_end());
        lines.push('\n');
    }
    Ok(lines)
}

fn move_files(from: &Path, to: &Path) -> Result {
    if !from.exists() {
        return Ok(());
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let mut file = File::create(to.join(entry.file_name()))?;
        file.write_all(&fs::read(entry.path())?)?;
        fs::remove_file(entry.path())?;
    }
    Ok(())
}

/// The commit that is measured, marked if the tree has changes beyond it.
fn commit() -> String {
    let output = Command::new("git")
        .args(["describe", "--always", "--dirty", "--exclude=*"])
        .current_dir(sh::root())
        .output();
    match output {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}

/// Today's date in UTC.
fn today() -> Result<String> {
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    let (year, month, day) = civil(i64::try_from(seconds / 86_400)?);
    Ok(format!("{year:04}-{month:02}-{day:02}"))
}

/// Year, month and day of a number of days since 1970-01-01, in the Gregorian calendar.
fn civil(mut days: i64) -> (i64, i64, i64) {
    let leap = |year: i64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let mut year = 1970;
    while days >= 365 + i64::from(leap(year)) {
        days -= 365 + i64::from(leap(year));
        year += 1;
    }
    let february = 28 + i64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(59), (1970, 3, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(20_088), (2024, 12, 31));
        assert_eq!(civil(20_089), (2025, 1, 1));
    }
}
