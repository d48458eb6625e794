//! The Markdown report of a run, and its plots.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use super::chart::{Chart, Point, Series, number};
use super::records::{Percentiles, RAW_LOOP, Record, Records, Summary};
use super::{ENOUGH_RUNS, SPECIAL};
use crate::Result;

/// A raw loop that varies by more than this makes every ratio of the run doubtful.
const NOISY_RAW_LOOP: f64 = 0.05;
/// The same for what is measured against it.
const NOISY_SCENARIO: f64 = 0.15;
/// Others' programs on the cores, as a share of them.
const NOISY_LOAD: f64 = 0.25;

/// The name of a percentile, and how it is read.
type Quantile = (&'static str, fn(&Percentiles) -> f64);

const QUANTILES: [Quantile; 5] =
    [("p50", |p| p.p50), ("p90", |p| p.p90), ("p99", |p| p.p99), ("p99.9", |p| p.p999), ("max", |p| p.max)];

pub(super) fn write(records: &Records, out: &Path, date: &str, command: &str) -> Result {
    let mut report = String::new();
    head(&mut report, records, date, command)?;
    for model in records.models() {
        writeln!(report, "\n## {model}")?;
        throughput(&mut report, records, model, out)?;
        latencies(&mut report, records, model, out)?;
        figures(&mut report, records, model)?;
    }
    if !records.failures.is_empty() {
        writeln!(report, "\n## Failures\n")?;
        for failure in &records.failures {
            writeln!(report, "- `{}`: {}", failure.scenario, failure.error)?;
        }
    }
    fs::write(out.join("report.md"), report)?;
    Ok(())
}

fn head(report: &mut String, records: &Records, date: &str, command: &str) -> Result {
    writeln!(report, "# Bench run of {date}\n")?;
    if let Some(machine) = records.machine() {
        writeln!(report, "| | |\n| --- | --- |")?;
        writeln!(report, "| devices | {} |", machine.devices.join(", "))?;
        writeln!(report, "| machine | {} cores, {}, {} |", machine.cores, machine.architecture, machine.os)?;
        writeln!(report, "| engine | {}, commit `{}` |", machine.engine, machine.commit)?;
        writeln!(report, "| llama.cpp | as in llama-cpp-sys-2 {} |", machine.llama_cpp_sys)?;
    }
    if let Some(run) = records.runs.iter().find(|run| run.machine.is_some()) {
        writeln!(
            report,
            "| flags | prompt {} tokens, {} samples, {} threads, {} GPU layers, batch {}, context {} |",
            run.prompt_tokens, run.sample_tokens, run.threads, run.gpu_layers, run.batch_size, run.ctx_size
        )?;
    }
    writeln!(report, "| report by | `{command}` |")?;
    let warnings = warnings(records);
    if !warnings.is_empty() {
        writeln!(report, "\n**Mind:**\n")?;
        for warning in &warnings {
            eprintln!("warning: {warning}");
            writeln!(report, "- {warning}")?;
        }
    }
    writeln!(
        report,
        "\nMedians of the runs; ± is half the distance from the least to the most. A ratio is the median of the runs' \
         ratios, each to the raw loop (`{RAW_LOOP}`) of the same repeat. -1 GPU layers are all of them."
    )?;
    Ok(())
}

fn warnings(records: &Records) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some(machine) = records.machine() {
        let load = machine.load_before.unwrap_or(0.0);
        if load > NOISY_LOAD * f64::from(machine.cores) {
            warnings.push(format!(
                "the machine was not idle before the run: a load of {load:.2} on {} cores",
                machine.cores
            ));
        }
        if machine.commit.ends_with("-dirty") {
            warnings.push("the tree had changes beyond the commit".to_owned());
        }
        if records.runs.iter().filter_map(|run| run.machine.as_ref()).any(|other| {
            (&other.devices, &other.commit, other.cores) != (&machine.devices, &machine.commit, machine.cores)
        }) {
            warnings.push(
                "the runs are of more than one machine or commit; the table shows the first".to_owned(),
            );
        }
    }
    for model in records.models() {
        for label in records.labels(model) {
            for n in records.numbers(model) {
                let Some(rate) = records.rate(model, &label, n) else { continue };
                if rate.runs < ENOUGH_RUNS {
                    warnings.push(format!(
                        "{model}, N = {n}, {label}: {} runs, fewer than {ENOUGH_RUNS}",
                        rate.runs
                    ));
                }
                let limit = if label.starts_with(RAW_LOOP) { NOISY_RAW_LOOP } else { NOISY_SCENARIO };
                // Half the distance, as the tables show it.
                if rate.spread() / 2.0 > limit && !is_special(&label) {
                    let half = 50.0 * rate.spread();
                    warnings.push(format!("{model}, N = {n}, {label}: noisy, ± {half:.0} %"));
                }
            }
        }
    }
    warnings
}

fn is_special(label: &str) -> bool {
    SPECIAL.iter().any(|special| label.starts_with(special))
}

fn throughput(report: &mut String, records: &Records, model: &str, out: &Path) -> Result {
    let labels: Vec<_> = records.labels(model).into_iter().filter(|label| !is_special(label)).collect();
    let mut numbers = records.numbers(model);
    numbers.retain(|&n| labels.iter().any(|label| records.rate(model, label, n).is_some()));
    if labels.is_empty() {
        return Ok(());
    }
    let columns: String = numbers.iter().fold(String::new(), |head, n| format!("{head} N = {n} |"));
    let rule = "---: |".repeat(numbers.len());
    let mut table = |title: &str, cell: &dyn Fn(&str, u32) -> Option<String>| -> Result {
        writeln!(report, "\n{title}\n\n| scenario |{columns}\n| --- |{rule}")?;
        for label in &labels {
            let cells = numbers.iter().map(|&n| cell(label, n).unwrap_or_else(|| "-".to_owned()));
            writeln!(report, "| {label} | {} |", cells.collect::<Vec<_>>().join(" | "))?;
        }
        Ok(())
    };
    table("Tokens a second, all sequences together:", &|label, n| {
        let rate = records.rate(model, label, n)?;
        Some(format!("{} ± {:.1} %", rounded(rate.median), 50.0 * rate.spread()))
    })?;
    table("Ratio to the raw loop:", &|label, n| {
        let ratio = records.ratio(model, label, n)?;
        Some(format!("{:.3}", ratio.median))
    })?;

    let point = |rate: Summary| Point { value: rate.median, low: rate.min, high: rate.max };
    let mut series: Vec<_> = labels
        .iter()
        .map(|label| Series {
            name: label.clone(),
            points: numbers.iter().map(|&n| records.rate(model, label, n).map(point)).collect(),
            ceiling: label == RAW_LOOP,
        })
        .collect();
    // The ceiling's area goes beneath the others' lines.
    series.sort_by_key(|series| !series.ceiling);
    let chart = Chart {
        title: format!("Throughput, {model}"),
        subtitle: "Medians, from the least to the most; dashed: the raw loop, the ceiling".to_owned(),
        x_title: "sequences (N)".to_owned(),
        y_title: "tokens a second, all sequences".to_owned(),
        categories: numbers.iter().map(u32::to_string).collect(),
        series,
        logarithmic: false,
    };
    plot(report, out, &format!("throughput-{model}"), &chart)
}

fn latencies(report: &mut String, records: &Records, model: &str, out: &Path) -> Result {
    let most = records.numbers(model).into_iter().max().unwrap_or(1);
    let mut rows = Vec::new();
    for label in records.labels(model) {
        for n in records.numbers(model) {
            let runs: Vec<_> = records.cell(model, &label, n).collect();
            let Some(first) = runs.first() else { continue };
            for name in first.latency_ms.keys() {
                rows.push((label.clone(), n, name.clone(), percentiles(&runs, name)));
            }
        }
    }
    if rows.is_empty() {
        return Ok(());
    }
    let names: String = QUANTILES.iter().fold(String::new(), |head, (name, _)| format!("{head} {name} |"));
    writeln!(
        report,
        "\nLatencies in milliseconds, medians of the runs' percentiles; `max` is the runs' largest:\n"
    )?;
    writeln!(
        report,
        "| scenario | N | latency |{names}\n| --- | ---: | --- |{}",
        "---: |".repeat(QUANTILES.len())
    )?;
    for (label, n, name, values) in &rows {
        let values = values.iter().map(|value| milliseconds(*value)).collect::<Vec<_>>().join(" | ");
        writeln!(report, "| {label} | {n} | {name} | {values} |")?;
    }

    let chart = |title: String, series: Vec<Series>| Chart {
        title,
        subtitle: "Medians of the runs' percentiles".to_owned(),
        x_title: "percentile".to_owned(),
        y_title: "milliseconds".to_owned(),
        categories: QUANTILES.iter().map(|(name, _)| (*name).to_owned()).collect(),
        series,
        logarithmic: true,
    };
    let series = |name: String, values: &[f64]| Series {
        name,
        points: values.iter().map(|&value| Some(Point { value, low: value, high: value })).collect(),
        ceiling: false,
    };
    let streamed = rows.iter().filter(|(label, n, name, _)| {
        !is_special(label)
            && *n == most
            && (name == "inter_token" || (name == "step" && label.starts_with("b_")))
    });
    let streamed = streamed.map(|(label, _, _, values)| series(label.clone(), values)).collect();
    let title = format!("Time from token to token, {model}, N = {most}");
    plot(report, out, &format!("latency-{model}"), &chart(title, streamed))?;
    for label in records.labels(model).into_iter().filter(|label| is_special(label)) {
        let own = rows.iter().filter(|(other, ..)| *other == label);
        let own = own.map(|(_, n, name, values)| series(format!("{name}, N = {n}"), values)).collect();
        let file: String = label.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        plot(report, out, &format!("latency-{model}-{file}"), &chart(format!("{label}, {model}"), own))?;
    }
    Ok(())
}

/// The median of each percentile over the runs; of the last one, the largest.
fn percentiles(runs: &[&Record], name: &str) -> Vec<f64> {
    let of_runs = || runs.iter().filter_map(|run| run.latency_ms.get(name));
    QUANTILES
        .iter()
        .map(|(quantile, read)| {
            let summary = Summary::of(of_runs().map(read).collect());
            summary.map_or(f64::NAN, |summary| if *quantile == "max" { summary.max } else { summary.median })
        })
        .collect()
}

/// Members that every line has, and that the tables above have shown.
const COMMON: [&str; 4] =
    ["elapsed_seconds", "total_tokens_sampled", "per_sequence_tokens_per_second", "kv_layout"];

fn figures(report: &mut String, records: &Records, model: &str) -> Result {
    let mut lines = Vec::new();
    for label in records.labels(model) {
        for n in records.numbers(model) {
            let runs: Vec<_> = records.cell(model, &label, n).collect();
            let Some(first) = runs.first() else { continue };
            for name in first.figures.keys().filter(|name| !COMMON.contains(&name.as_str())) {
                let values = runs.iter().filter_map(|run| run.figures.get(name)?.as_f64()).collect();
                if let Some(values) = Summary::of(values) {
                    lines.push(format!("| {label} | {n} | {name} | {} |", rounded(values.median)));
                }
            }
        }
    }
    if !lines.is_empty() {
        writeln!(report, "\nFurther figures, medians of the runs:\n")?;
        writeln!(
            report,
            "| scenario | N | figure | value |\n| --- | ---: | --- | ---: |\n{}",
            lines.join("\n")
        )?;
    }
    Ok(())
}

fn plot(report: &mut String, out: &Path, name: &str, chart: &Chart) -> Result {
    if let Some(svg) = chart.svg() {
        let file = format!("{name}.svg");
        fs::write(out.join(&file), svg)?;
        writeln!(report, "\n![{}]({file})", chart.title)?;
    }
    Ok(())
}

/// Three or four digits that count.
fn rounded(value: f64) -> String {
    if value.abs() >= 1000.0 {
        number(value)
    } else if value.abs() >= 100.0 {
        format!("{value:.0}")
    } else if value.abs() >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.3}")
    }
}

fn milliseconds(value: f64) -> String {
    if value.is_nan() { "-".to_owned() } else { rounded(value) }
}
