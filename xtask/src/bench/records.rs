//! The lines of JSON that engine-bench and the peers print, and what is computed from them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::Result;

/// What everything is measured against.
pub(super) const RAW_LOOP: &str = "b_shared_context_argmax";

/// One measured run. Members that only engine-bench prints have defaults.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Record {
    pub(super) scenario: String,
    pub(super) num_sequences: u32,
    pub(super) prompt_tokens: u32,
    pub(super) sample_tokens: u32,
    pub(super) aggregate_tokens_per_second: f64,
    #[serde(default)]
    pub(super) model: String,
    #[serde(default)]
    pub(super) run: u32,
    #[serde(default)]
    pub(super) variant: String,
    #[serde(default)]
    pub(super) threads: u32,
    #[serde(default)]
    pub(super) gpu_layers: i32,
    #[serde(default)]
    pub(super) batch_size: u32,
    #[serde(default)]
    pub(super) ctx_size: u32,
    #[serde(default)]
    pub(super) latency_ms: BTreeMap<String, Percentiles>,
    pub(super) machine: Option<Machine>,
    /// Figures of a scenario alone.
    #[serde(flatten)]
    pub(super) figures: Map<String, Value>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Percentiles {
    pub(super) p50: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
    pub(super) p999: f64,
    pub(super) max: f64,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Machine {
    pub(super) os: String,
    pub(super) architecture: String,
    pub(super) cores: u32,
    pub(super) devices: Vec<String>,
    pub(super) load_before: Option<f64>,
    pub(super) engine: String,
    pub(super) llama_cpp_sys: String,
    pub(super) commit: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Failure {
    pub(super) scenario: String,
    pub(super) error: String,
}

#[derive(Debug, Default)]
pub(super) struct Records {
    pub(super) runs: Vec<Record>,
    pub(super) failures: Vec<Failure>,
}

/// What a median says of some runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Summary {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
    pub(super) runs: usize,
}

impl Summary {
    /// `None` of no values.
    pub(super) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_unstable_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            f64::midpoint(values[middle - 1], values[middle])
        };
        Some(Self { median, min, max, runs: values.len() })
    }

    /// From the least to the most, as a share of the median.
    pub(super) fn spread(&self) -> f64 {
        (self.max - self.min) / self.median
    }
}

/// Reads lines of results and failures; an empty line is nothing.
pub(super) fn parse(lines: &str) -> Result<Records> {
    let mut records = Records::default();
    for (index, line) in lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let fail = |error: serde_json::Error| format!("line {} is not a result: {error}", index + 1);
        let value: Value = serde_json::from_str(line).map_err(fail)?;
        if value.get("error").is_some() {
            records.failures.push(serde_json::from_value(value).map_err(fail)?);
        } else {
            records.runs.push(serde_json::from_value(value).map_err(fail)?);
        }
    }
    if records.runs.is_empty() && records.failures.is_empty() {
        return Err("there are no results".into());
    }
    Ok(records)
}

impl Record {
    /// The scenario, with the settings that are not its usual ones.
    pub(super) fn label(&self) -> String {
        if self.variant.is_empty() {
            self.scenario.clone()
        } else {
            format!("{} ({})", self.scenario, self.variant)
        }
    }
}

impl Records {
    pub(super) fn machine(&self) -> Option<&Machine> {
        self.runs.iter().find_map(|run| run.machine.as_ref())
    }

    /// The machine's name as a part of a path.
    pub(super) fn machine_slug(&self) -> String {
        let Some(machine) = self.machine() else { return "unknown".to_owned() };
        let device = machine.devices.first().map_or("cpu", String::as_str);
        let name = format!("{device} {} cores", machine.cores).to_lowercase();
        let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        words.collect::<Vec<_>>().join("-")
    }

    pub(super) fn models(&self) -> BTreeSet<&str> {
        self.runs.iter().map(|run| run.model.as_str()).collect()
    }

    pub(super) fn labels(&self, model: &str) -> BTreeSet<String> {
        self.runs.iter().filter(|run| run.model == model).map(Record::label).collect()
    }

    pub(super) fn numbers(&self, model: &str) -> Vec<u32> {
        let of_model = self.runs.iter().filter(|run| run.model == model);
        of_model.map(|run| run.num_sequences).collect::<BTreeSet<_>>().into_iter().collect()
    }

    pub(super) fn cell<'a>(
        &'a self,
        model: &'a str,
        label: &'a str,
        n: u32,
    ) -> impl Iterator<Item = &'a Record> {
        self.runs
            .iter()
            .filter(move |run| run.model == model && run.num_sequences == n && run.label() == label)
    }

    pub(super) fn rate(&self, model: &str, label: &str, n: u32) -> Option<Summary> {
        Summary::of(self.cell(model, label, n).map(|run| run.aggregate_tokens_per_second).collect())
    }

    /// Each run's rate against the raw loop's of the same repeat. A run with other settings is compared with the raw
    /// loop of those, or, where that did not run, with the usual one.
    pub(super) fn ratio(&self, model: &str, label: &str, n: u32) -> Option<Summary> {
        let ratios = self.cell(model, label, n).filter_map(|run| {
            let raw = |variant: &str| {
                self.runs.iter().find(|raw| {
                    raw.scenario == RAW_LOOP
                        && raw.model == model
                        && (raw.num_sequences, raw.run) == (n, run.run)
                        && raw.variant == variant
                })
            };
            let raw = raw(&run.variant).or_else(|| raw(""))?;
            Some(run.aggregate_tokens_per_second / raw.aggregate_tokens_per_second)
        });
        Summary::of(ratios.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(scenario: &str, n: u32, run: u32, rate: f64) -> String {
        format!(
            r#"{{"scenario":"{scenario}","num_sequences":{n},"prompt_tokens":8,"sample_tokens":4,"elapsed_seconds":1.0,"total_tokens_sampled":3,"aggregate_tokens_per_second":{rate},"per_sequence_tokens_per_second":1.0,"model":"m","run":{run},"mean_rows":1.5}}"#
        )
    }

    #[test]
    fn ratios_are_to_the_raw_loop_of_the_same_repeat() {
        let lines = [
            line(RAW_LOOP, 2, 1, 100.0),
            line("c", 2, 1, 90.0),
            line("c", 2, 2, 190.0),
            line(RAW_LOOP, 2, 2, 200.0),
            line("c", 4, 1, 1.0),
        ]
        .join("\n");
        let records = parse(&lines).expect("the lines are results");
        let ratio = records.ratio("m", "c", 2).expect("there is a raw loop");
        assert!((ratio.median - 0.925).abs() < 1e-9, "{ratio:?}");
        assert!(records.ratio("m", "c", 4).is_none());
        assert_eq!(records.numbers("m"), [2, 4]);
        assert_eq!(records.runs[0].figures["mean_rows"], 1.5);
    }

    #[test]
    fn failures_are_kept_and_nonsense_is_refused_by_its_line() {
        let lines = format!("{}\n\n{}\n", line("c", 1, 1, 5.0), r#"{"scenario":"d","error":"no"}"#);
        let records = parse(&lines).expect("both are lines of a run");
        assert_eq!((records.runs.len(), records.failures.len()), (1, 1));
        let error = parse("{}\n").expect_err("an object without members").to_string();
        assert!(error.starts_with("line 1 "), "{error}");
        parse("\n").expect_err("nothing at all");
    }

    #[test]
    fn a_median_is_in_the_middle() {
        let summary = Summary::of(vec![4.0, 1.0, 3.0, 2.0]).expect("there are values");
        assert!((summary.median - 2.5).abs() < 1e-9 && (summary.spread() - 1.2).abs() < 1e-9);
        assert!(Summary::of(Vec::new()).is_none());
    }
}
