//! The command line, as people and scripts use it.

use std::process::{Command, Output};

use engine_bench::Scenario;
use fixtures::SmallModel;

fn engine_bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_engine-bench"));
    command.args(arguments).output().expect("the program starts")
}

fn lines(output: &Output) -> Vec<serde_json::Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(|line| serde_json::from_str(line).expect("each line is JSON")).collect()
}

#[test]
fn every_run_is_a_line() {
    let model = fixtures::small(SmallModel::Full);
    let folder = std::env::temp_dir().join(format!("engine-bench-{}", std::process::id()));
    let output = engine_bench(&[
        "--model",
        &model.to_string_lossy(),
        "--scenario",
        "b_shared_context_argmax,c_engine_threaded",
        "--num-sequences",
        "1,2",
        "--prompt-tokens",
        "20",
        "--sample-tokens",
        "10",
        "--threads",
        "1",
        "--gpu-layers",
        "-1",
        "--repeat",
        "2",
        "--hgrm",
        &folder.to_string_lossy(),
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = lines(&output);
    let order: Vec<_> = lines
        .iter()
        .map(|line| (line["run"].as_u64(), line["num_sequences"].as_u64(), line["scenario"].as_str()))
        .collect();
    let (raw, engine) = (Some("b_shared_context_argmax"), Some("c_engine_threaded"));
    // The warm-up went forwards, so the first measured run goes backwards.
    assert_eq!(
        order,
        [
            (1, 1, engine),
            (1, 1, raw),
            (1, 2, engine),
            (1, 2, raw),
            (2, 1, raw),
            (2, 1, engine),
            (2, 2, raw),
            (2, 2, engine)
        ]
        .map(|(run, n, scenario)| (Some(run), Some(n), scenario))
    );
    for line in &lines {
        let n = line["num_sequences"].as_u64().expect("a number");
        assert_eq!(line["total_tokens_sampled"], 9 * n);
        let rate = line["aggregate_tokens_per_second"].as_f64().expect("a number");
        let each = line["per_sequence_tokens_per_second"].as_f64().expect("a number");
        let elapsed = line["elapsed_seconds"].as_f64().expect("a number");
        assert!(
            (rate * elapsed / (9 * n) as f64 - 1.0).abs() < 1e-6
                && (each * n as f64 / rate - 1.0).abs() < 1e-6
        );
    }
    let kept = std::fs::read_to_string(folder.join("full-n2-c_engine_threaded-inter_token.hgrm"));
    assert!(kept.expect("latencies are kept").contains("#[Max"));
    std::fs::remove_dir_all(folder).expect("the test's own folder");
    // The summary compares with the raw loop.
    assert!(String::from_utf8_lossy(&output.stderr).contains("ratio"));
}

#[test]
fn failures_are_lines_and_a_status() {
    let small = fixtures::small(SmallModel::Full);
    let small = small.to_string_lossy();
    for (arguments, named) in [
        (vec!["--model", "missing.gguf", "--scenario", "b_shared_context"], "missing.gguf"),
        (vec!["--model", "missing.gguf", "--scenario", "c_engine_threaded"], "missing.gguf"),
        (vec!["--model", &small, "--scenario", "nonsense"], "unknown scenario"),
        (vec!["--model", &small, "--scenario", "churn", "--sample-tokens", "1"], "--sample-tokens"),
        (vec!["--scenario", "churn"], "--model"),
    ] {
        let output = engine_bench(&arguments);
        assert!(!output.status.success(), "{arguments:?}");
        let lines = lines(&output);
        assert_eq!(lines.len(), 1, "{arguments:?}");
        assert_eq!(
            lines[0]["scenario"],
            arguments[arguments.iter().position(|a| *a == "--scenario").unwrap_or(0) + 1]
        );
        let error = lines[0]["error"].as_str().expect("a failure says why");
        assert!(error.contains(named), "{arguments:?}: {error}");
    }
}

#[test]
fn the_list_names_every_scenario() {
    let output = engine_bench(&["--scenario", "list"]);
    let names: Vec<_> = Scenario::ALL.iter().map(|scenario| scenario.name()).collect();
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().collect::<Vec<_>>(), names);
}
