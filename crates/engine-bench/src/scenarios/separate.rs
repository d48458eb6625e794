//! N contexts of one sequence, each decoded from a thread of its own.

use crate::error::BenchError;
use crate::raw::{Context, ContextShape, Model, Row, Token};
use crate::report::Outcome;
use crate::scenarios::hosts::{Host, drive};
use crate::scenarios::{Selection, Selector, check_samples};
use crate::settings::Settings;

struct Separate<'m> {
    context: Context<'m>,
    selector: Selector,
    last: Token,
    position: usize,
}

pub(super) fn run(
    model: &Model,
    settings: &Settings,
    selection: Selection,
    threads: u32,
) -> Result<Outcome, BenchError> {
    let prompt = Settings::prompt(settings.prompt_tokens, |text| model.tokenize(text))?;
    let shape = ContextShape { n_ctx: settings.ctx_size, n_seq_max: 1, threads, kv_unified: false };
    let mut hosts = Vec::new();
    for sequence in 0..settings.num_sequences {
        let mut context = Context::new(model, settings, shape)?;
        let mut selector = Selector::new(selection, model, settings, sequence);
        // One after the other: the prompt is not timed, and side by side the contexts only stand in each other's way.
        context.decode_prompt(0, &prompt)?;
        let last = selector.select(&context, -1);
        hosts.push(Separate { context, selector, last, position: prompt.len() });
    }
    let mut outcome = drive(&mut hosts, settings.settle_samples() as usize, settings.timed_samples())?;
    // The prompts were decoded before, so the driver's time to the first token says nothing.
    outcome.latencies.retain(|(name, _)| *name != "first_token");
    outcome.figures.push(("threads_a_context", threads.into()));
    check_samples(&outcome.tokens, settings, |token| model.is_eog(token))?;
    Ok(outcome)
}

impl Host for Separate<'_> {
    fn prompt(&mut self) -> Result<Token, BenchError> {
        Ok(self.last)
    }

    fn next(&mut self) -> Result<Token, BenchError> {
        let row = Row { token: self.last, position: self.position as i32, sequence: 0, logits: true };
        self.context.decode(&[row])?;
        self.last = self.selector.select(&self.context, 0);
        self.position += 1;
        Ok(self.last)
    }
}
