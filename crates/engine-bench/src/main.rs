//! Runs scenarios and prints one line of JSON for each run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use engine_bench::latency::{Latency, middle};
use engine_bench::report::{Failure, Machine};
use engine_bench::{BenchError, Models, Outcome, Report, Scenario, Settings};

/// Measures raw llama.cpp loops and the engine, side by side.
///
/// Each run is a line of JSON on standard output. Lists, separated by commas, make a matrix, which runs in interleaved
/// order: all scenarios of a number of sequences, then the next number, and all of it again for each repeat, every second
/// time backwards.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// GGUF files.
    #[arg(long, value_delimiter = ',', value_name = "PATH")]
    model: Vec<PathBuf>,
    /// Names of scenarios; `list` prints all.
    #[arg(long, value_delimiter = ',', value_name = "NAME", required = true)]
    scenario: Vec<String>,
    /// Sequences, all alive at once.
    #[arg(long, value_delimiter = ',', default_value = "2", value_name = "N")]
    num_sequences: Vec<u32>,
    /// Measured runs of each.
    #[arg(long, default_value_t = 1, value_name = "R", value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Runs of each before those, not reported; default: one if there are repeats.
    #[arg(long, value_name = "R")]
    warmup: Option<u32>,
    /// Where to keep latencies as `.hgrm` files, all runs of a scenario together.
    #[arg(long, value_name = "DIR")]
    hgrm: Option<PathBuf>,
    #[command(flatten)]
    settings: Settings,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if cli.scenario.iter().any(|name| name == "list") {
        for scenario in Scenario::ALL {
            println!("{}", scenario.name());
        }
        return ExitCode::SUCCESS;
    }
    if cli.settings.verbose {
        tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    }
    let mut runner = Runner {
        machine: Machine::this(),
        models: Models::default(),
        failures: 0,
        rates: BTreeMap::new(),
        latencies: BTreeMap::new(),
    };
    if cli.model.is_empty() {
        runner.fail_all(&cli, &BenchError::Settings("--model is missing".to_owned()));
    }
    for model in &cli.model {
        runner.run_model(&cli, model);
    }
    if cli.repeat > 1 {
        runner.print_summary();
    }
    if let Some(dir) = &cli.hgrm
        && let Err(error) = runner.write_hgrm(dir)
    {
        eprintln!("{error}");
        runner.failures += 1;
    }
    if runner.failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A model's file, a number of sequences, a scenario's name.
type Cell = (String, u32, &'static str);

struct Runner {
    machine: Machine,
    models: Models,
    failures: u32,
    rates: BTreeMap<Cell, Vec<f64>>,
    latencies: BTreeMap<(Cell, &'static str), Latency>,
}

impl Runner {
    fn run_model(&mut self, cli: &Cli, model: &Path) {
        let warmup = cli.warmup.unwrap_or(u32::from(cli.repeat > 1));
        for round in 0..warmup + cli.repeat {
            // 1 is the first run that counts.
            let run = (round + 1).checked_sub(warmup).filter(|&run| run > 0);
            for &num_sequences in &cli.num_sequences {
                let mut names: Vec<_> = cli.scenario.iter().map(String::as_str).collect();
                if round % 2 == 1 {
                    names.reverse();
                }
                for name in names {
                    let settings =
                        Settings { model: model.to_owned(), num_sequences, ..cli.settings.clone() };
                    if let Err(error) = self.run_one(name, &settings, run) {
                        self.failures += 1;
                        println!("{}", Failure::new(name, &error));
                    }
                }
            }
        }
    }

    fn fail_all(&mut self, cli: &Cli, error: &BenchError) {
        for name in &cli.scenario {
            self.failures += 1;
            println!("{}", Failure::new(name, error));
        }
    }

    fn run_one(&mut self, name: &str, settings: &Settings, run: Option<u32>) -> Result<(), BenchError> {
        let scenario: Scenario = name.parse()?;
        let settings = scenario.settings(settings);
        let outcome = scenario.run(&mut self.models, &settings)?;
        if let Some(run) = run {
            let report = Report::new(scenario, &settings, run, &outcome, &self.machine);
            println!("{report}");
            let file = settings.model.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let rate = report.rate();
            self.keep((file, settings.num_sequences, scenario.name()), rate, outcome);
        }
        Ok(())
    }

    fn keep(&mut self, cell: Cell, rate: f64, outcome: Outcome) {
        for (name, latency) in outcome.latencies {
            self.latencies.entry((cell.clone(), name)).or_default().add(&latency);
        }
        self.rates.entry(cell).or_default().push(rate);
    }

    /// Medians, and their ratios to the raw loop's, on standard error.
    fn print_summary(&self) {
        let median = |rates: &[f64]| middle(rates.iter().copied()).unwrap_or(f64::NAN);
        eprintln!(
            "{:<24} {:>3} {:<36} {:>10} {:>8} {:>7}",
            "model", "N", "scenario", "tokens/s", "spread", "ratio"
        );
        for ((model, n, scenario), rates) in &self.rates {
            let median_rate = median(rates);
            let (min, max) =
                rates.iter().fold((f64::MAX, 0f64), |(min, max), &rate| (min.min(rate), max.max(rate)));
            let raw = self.rates.get(&(model.clone(), *n, Scenario::RAW_LOOP.name()));
            let ratio = raw.map_or_else(|| "-".to_owned(), |raw| format!("{:.3}", median_rate / median(raw)));
            let spread = 100.0 * (max - min) / median_rate;
            eprintln!("{model:<24} {n:>3} {scenario:<36} {median_rate:>10.1} {spread:>7.1}% {ratio:>7}");
        }
    }

    fn write_hgrm(&self, dir: &Path) -> Result<(), BenchError> {
        std::fs::create_dir_all(dir)
            .map_err(|error| BenchError::Write { path: dir.to_owned(), reason: error.to_string() })?;
        for (((model, n, scenario), name), latency) in &self.latencies {
            latency.write_hgrm(&dir.join(format!("{model}-n{n}-{scenario}-{name}.hgrm")))?;
        }
        Ok(())
    }
}
