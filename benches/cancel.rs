//! From a cancel in the middle of a long prompt to the caller's answer.

use std::time::Duration;

use benches::{add_up, subjects};
use criterion::{BenchmarkId, Criterion, SamplingMode, criterion_group, criterion_main};
use engine_bench::{Models, Outcome, Scenario};

fn in_prompt(outcome: &Outcome) -> Duration {
    let latency = outcome.latencies.iter().find(|(name, _)| *name == "cancel_in_prompt");
    latency.map(|(_, latency)| latency.mean()).expect("the scenario measures it")
}

fn cancel(criterion: &mut Criterion) {
    let mut models = Models::default();
    let mut group = criterion.benchmark_group("cancel_in_prompt");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    for subject in subjects() {
        let settings = subject.settings(Scenario::CancelLatency, 1);
        group.measurement_time(subject.measurement_time).warm_up_time(subject.measurement_time / 20);
        group.bench_function(BenchmarkId::from_parameter(&subject.name), |bencher| {
            bencher.iter_custom(|iterations| {
                add_up(&mut models, Scenario::CancelLatency, &settings, iterations, in_prompt)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, cancel);
criterion_main!(benches);
