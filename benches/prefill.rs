//! A long prompt decoded while another sequence streams: tokens of the prompt a second.

use benches::{add_up, subjects};
use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use engine_bench::{Models, Scenario};

fn prefill(criterion: &mut Criterion) {
    let mut models = Models::default();
    for subject in subjects() {
        let settings = subject.settings(Scenario::PrefillInterference, 2);
        let mut group = criterion.benchmark_group("prefill_while_streaming");
        group.sample_size(10).sampling_mode(SamplingMode::Flat);
        group.measurement_time(subject.measurement_time).warm_up_time(subject.measurement_time / 20);
        group.throughput(Throughput::Elements(settings.long_prompt_tokens.into()));
        group.bench_function(BenchmarkId::from_parameter(&subject.name), |bencher| {
            bencher.iter_custom(|iterations| {
                let time = |outcome: &engine_bench::Outcome| outcome.elapsed;
                add_up(&mut models, Scenario::PrefillInterference, &settings, iterations, time)
            });
        });
        group.finish();
    }
}

criterion_group!(benches, prefill);
criterion_main!(benches);
