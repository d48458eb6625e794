//! Tokens a second: each number of sequences against the raw loops, the first design and the engine.

use benches::{add_up, subjects};
use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use engine_bench::{Models, Scenario};

const SCENARIOS: [Scenario; 5] = [
    Scenario::SharedContextArgmax,
    Scenario::TwoContextsSharedCores,
    Scenario::Phase1Loop,
    Scenario::EngineThreaded,
    Scenario::EngineGenerate,
];

fn throughput(criterion: &mut Criterion) {
    for subject in subjects() {
        let mut models = Models::default();
        for n in [1, 4] {
            let mut group = criterion.benchmark_group(format!("throughput/{}/n{n}", subject.name));
            group.sample_size(10).sampling_mode(SamplingMode::Flat);
            group.measurement_time(subject.measurement_time).warm_up_time(subject.measurement_time / 20);
            for scenario in SCENARIOS {
                let settings = subject.settings(scenario, n);
                group.throughput(Throughput::Elements(u64::from(n) * settings.timed_samples() as u64));
                group.bench_function(BenchmarkId::from_parameter(scenario.name()), |bencher| {
                    bencher.iter_custom(|iterations| {
                        add_up(&mut models, scenario, &settings, iterations, |outcome| outcome.elapsed)
                    });
                });
            }
            group.finish();
        }
    }
}

criterion_group!(benches, throughput);
criterion_main!(benches);
