//! The engine's first design, kept as what its gain is measured against: host threads send one request a token to a
//! decoder thread, which waits a fixed window for more, decodes them in the order of their arrival, samples with
//! `llama_sampler_sample` and answers each through a channel made for that one answer.

use std::time::{Duration, Instant};

use crate::error::BenchError;
use crate::latency::Latency;
use crate::raw::{Context, ContextShape, Model, Row, Sampler, Token};
use crate::report::Outcome;
use crate::scenarios::check_samples;
use crate::scenarios::hosts::{Host, drive};
use crate::settings::Settings;

/// How long the decoder waits for more after the first request, always.
const BATCH_WINDOW: Duration = Duration::from_micros(200);

struct Request {
    row: Row,
    asked: Instant,
    promise: flume::Sender<Token>,
}

struct Phase1Host {
    requests: flume::Sender<Request>,
    sequence: i32,
    last: Token,
    position: usize,
}

/// What the decoder thread has measured.
#[derive(Default)]
struct Decoded {
    queue_waits: Vec<Duration>,
    steps: Vec<Duration>,
    rows: usize,
}

pub(super) fn run(model: &Model, settings: &Settings) -> Result<Outcome, BenchError> {
    let mut context = Context::new(model, settings, ContextShape::shared(model, settings))?;
    let prompt = Settings::prompt(settings.prompt_tokens, |text| model.tokenize(text))?;
    let (requests, queue) = flume::unbounded();
    let (mut samplers, mut hosts) = (Vec::new(), Vec::new());
    for sequence in 0..settings.num_sequences {
        context.decode_prompt(sequence, &prompt)?;
        let mut sampler = Sampler::new(model, &settings.sampling);
        let last = sampler.sample(&context, -1);
        samplers.push(sampler);
        let (requests, sequence) = (requests.clone(), sequence as i32);
        hosts.push(Phase1Host { requests, sequence, last, position: prompt.len() });
    }
    drop(requests);

    let (settle, timed) = (settings.settle_samples() as usize, settings.timed_samples());
    let (outcome, decoded) = std::thread::scope(|scope| {
        let decoder = scope.spawn(|| decode_or_give_up(context, &queue, samplers));
        let outcome = drive(&mut hosts, settle, timed);
        // With the last sender gone the decoder ends.
        drop(hosts);
        (outcome, decoder.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let decoded = decoded?;
    let mut outcome = outcome?;
    outcome.latencies.retain(|(name, _)| *name != "first_token");
    outcome.latencies.push(("queue_wait", Latency::each(decoded.queue_waits)));
    outcome.figures.push(("mean_rows", decoded.rows as f64 / decoded.steps.len() as f64));
    outcome.latencies.push(("step", Latency::each(decoded.steps)));
    check_samples(&outcome.tokens, settings, |token| model.is_eog(token))?;
    Ok(outcome)
}

fn decode_or_give_up(
    context: Context<'_>,
    queue: &flume::Receiver<Request>,
    samplers: Vec<Sampler>,
) -> Result<Decoded, BenchError> {
    let decoded = decode_requests(context, queue, samplers);
    // After a failure the hosts still wait: dropping their requests, and so the promises, tells each that there is no
    // answer, until the last of them has gone.
    queue.iter().for_each(drop);
    decoded
}

fn decode_requests(
    mut context: Context<'_>,
    queue: &flume::Receiver<Request>,
    mut samplers: Vec<Sampler>,
) -> Result<Decoded, BenchError> {
    let mut decoded = Decoded::default();
    let mut pending = Vec::with_capacity(samplers.len());
    let mut rows = Vec::with_capacity(samplers.len());
    while let Ok(first) = queue.recv() {
        let deadline = Instant::now() + BATCH_WINDOW;
        pending.push(first);
        while let Ok(request) = queue.recv_deadline(deadline) {
            pending.push(request);
        }
        let started = Instant::now();
        decoded.queue_waits.extend(pending.iter().map(|request| started - request.asked));
        rows.clear();
        rows.extend(pending.iter().map(|request| request.row));
        context.decode(&rows)?;
        decoded.rows += rows.len();
        for (row, request) in pending.drain(..).enumerate() {
            let token = samplers[request.row.sequence as usize].sample(&context, row as i32);
            // A host that failed does not wait for its answer any more.
            let _ = request.promise.send(token);
        }
        decoded.steps.push(started.elapsed());
    }
    Ok(decoded)
}

impl Host for Phase1Host {
    fn prompt(&mut self) -> Result<Token, BenchError> {
        Ok(self.last)
    }

    fn next(&mut self) -> Result<Token, BenchError> {
        let ended = || BenchError::Missed("the decoder thread ended before its hosts".to_owned());
        let row =
            Row { token: self.last, position: self.position as i32, sequence: self.sequence, logits: true };
        let (promise, answer) = flume::bounded(1);
        self.requests.send(Request { row, asked: Instant::now(), promise }).map_err(|_| ended())?;
        self.last = answer.recv().map_err(|_| ended())?;
        self.position += 1;
        Ok(self.last)
    }
}
