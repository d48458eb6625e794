//! Every scenario, on the small models: what was to be sampled has been, and the engine says what the raw loop says.

use std::num::NonZeroU32;

use engine_bench::{BenchError, Models, Outcome, Scenario, Settings};
use fixtures::SmallModel;

fn settings(model: SmallModel, num_sequences: u32) -> Settings {
    let mut settings = Settings::new(fixtures::small(model), num_sequences);
    settings.prompt_tokens = 40;
    settings.sample_tokens = 30;
    settings.long_prompt_tokens = 700;
    settings.ctx_size = 256;
    // On a busy machine, two threads of one step wait for each other by spinning.
    settings.threads = NonZeroU32::new(1);
    settings
}

fn run(scenario: Scenario, settings: &Settings) -> Outcome {
    let settings = scenario.settings(settings);
    scenario
        .run(&mut Models::default(), &settings)
        .unwrap_or_else(|error| panic!("{} on {}: {error}", scenario.name(), settings.model.display()))
}

#[test]
fn scenarios_of_throughput_take_every_sample() {
    for scenario in
        Scenario::ALL.into_iter().take_while(|&scenario| scenario != Scenario::PrefillInterference)
    {
        for n in [1, 3] {
            let settings = settings(SmallModel::Full, n);
            let outcome = run(scenario, &settings);
            assert_eq!(outcome.samples, n as usize * settings.timed_samples(), "{}", scenario.name());
            assert!(!outcome.elapsed.is_zero());
        }
    }
}

#[test]
fn the_engine_and_the_raw_loops_say_the_same() {
    for model in SmallModel::ALL {
        let settings = settings(model, 3);
        let raw = run(Scenario::RAW_LOOP, &settings).tokens;
        for scenario in [
            Scenario::SharedContext,
            Scenario::TwoContextsSharedCores,
            Scenario::Phase1Loop,
            Scenario::EngineThreaded,
        ] {
            assert_eq!(run(scenario, &settings).tokens, raw, "{} on {}", scenario.name(), model.name());
        }
    }
}

#[test]
fn the_other_scenarios_measure_what_they_are_named_for() {
    for model in SmallModel::ALL {
        let settings = settings(model, 4);
        for (scenario, latency) in [
            (Scenario::PrefillInterference, "inter_token"),
            (Scenario::TypingSession, "reuse_last_token"),
            (Scenario::CancelLatency, "cancel_in_token"),
            (Scenario::Churn, "inter_token"),
        ] {
            let outcome = run(scenario, &settings);
            let latency = outcome.latencies.iter().find(|(name, _)| *name == latency);
            let (_, latency) = latency.unwrap_or_else(|| panic!("{} has its latency", scenario.name()));
            assert!(latency.percentiles().count > 0, "{}", scenario.name());
        }
    }
}

#[test]
fn reuse_decodes_only_what_was_typed() {
    let outcome = run(Scenario::TypingSession, &settings(SmallModel::Full, 1));
    let figure = |name| {
        let figure = outcome.figures.iter().find(|(figure, _)| *figure == name);
        figure.map(|(_, value)| *value).expect("the scenario counts it")
    };
    // A keystroke changes a token or two at the end.
    assert!(figure("reuse_decoded_prompt_tokens") <= 2.0 * figure("keystrokes"));
    assert!(figure("cold_decoded_prompt_tokens") >= 40.0 * figure("keystrokes"));
}

#[test]
fn what_does_not_fit_fails_before_it_runs() {
    let mut settings = settings(SmallModel::Full, 2);
    settings.ctx_size = 50;
    for scenario in Scenario::ALL.into_iter().filter(|scenario| !scenario.has_long_prompt()) {
        let settings = scenario.settings(&settings);
        let error = scenario.run(&mut Models::default(), &settings).expect_err("70 positions in 50");
        assert!(matches!(error, BenchError::Settings(_)), "{}: {error}", scenario.name());
    }
}
