//! What the criterion benches share: the models that they run, and how a scenario of `engine-bench` becomes a time.

use std::path::PathBuf;
use std::time::Duration;

use engine_bench::{Models, Outcome, Scenario, Settings};
use fixtures::SmallModel;
use fixtures::manifest::Manifest;

/// A model, and settings that suit its size.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Its name in the results.
    pub name: String,
    /// How long criterion may take for one figure.
    pub measurement_time: Duration,
    path: PathBuf,
    prompt_tokens: u32,
    sample_tokens: u32,
    long_prompt_tokens: u32,
}

/// The real models if they have been fetched, else the small ones; it says which.
#[must_use]
pub fn subjects() -> Vec<Subject> {
    let real: Vec<_> = Manifest::load()
        .map(|manifest| manifest.models)
        .unwrap_or_default()
        .iter()
        .filter(|model| model.path().is_file())
        .map(|model| Subject {
            name: model.name.clone(),
            measurement_time: Duration::from_secs(4),
            path: model.path(),
            prompt_tokens: 32,
            sample_tokens: 24,
            long_prompt_tokens: 256,
        })
        .collect();
    if !real.is_empty() {
        eprintln!("running the real models; bigger runs, and a report: `cargo xtask bench`");
        return real;
    }
    eprintln!("running the small models, whose speed says little; `cargo xtask fixtures` fetches real ones");
    [SmallModel::Full, SmallModel::Recurrent]
        .into_iter()
        .map(|model| Subject {
            name: format!("small-{}", model.name()),
            measurement_time: Duration::from_secs(1),
            path: fixtures::small(model),
            prompt_tokens: 64,
            sample_tokens: 128,
            long_prompt_tokens: 1024,
        })
        .collect()
}

impl Subject {
    /// A scenario's settings for this model.
    #[must_use]
    pub fn settings(&self, scenario: Scenario, num_sequences: u32) -> Settings {
        let mut settings = Settings::new(self.path.clone(), num_sequences);
        settings.prompt_tokens = self.prompt_tokens;
        settings.sample_tokens = self.sample_tokens;
        settings.long_prompt_tokens = self.long_prompt_tokens;
        settings.ctx_size = 512;
        scenario.settings(&settings)
    }
}

/// Runs a scenario as often as criterion wants, and adds up what `time` reads from each outcome.
///
/// # Panics
/// When the scenario fails: there is no time of what did not happen.
pub fn add_up(
    models: &mut Models,
    scenario: Scenario,
    settings: &Settings,
    iterations: u64,
    time: impl Fn(&Outcome) -> Duration,
) -> Duration {
    let run = |_| match scenario.run(models, settings) {
        Ok(outcome) => time(&outcome),
        Err(error) => panic!("{} with {}: {error}", scenario.name(), settings.model.display()),
    };
    (0..iterations).map(run).sum()
}
