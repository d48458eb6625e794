//! Streams several completions at once out of one context, then the same ones one after another, and compares.
//!
//! `cargo xtask demo` runs it on a real model.

use std::error::Error;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Parser;
use engine::{Engine, EngineConfig, GenerateOptions, Generation, Metrics, Outcome};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

#[derive(Parser)]
struct Args {
    /// A GGUF model.
    #[arg(long)]
    model: PathBuf,
    /// A prompt to complete; give several. Without any there are four.
    #[arg(long = "prompt")]
    prompts: Vec<String>,
    /// Tokens a completion at most.
    #[arg(long, default_value_t = 64)]
    max_tokens: u32,
    /// Draw tokens at this temperature, instead of the most likely ones.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
}

const PROMPTS: [&str; 4] = [
    "The lighthouse keeper looked at the sea and",
    "To make a good cup of tea, first",
    "The three most important things about a bicycle are",
    "Dear team, I am writing to let you know that",
];

/// Columns of a line in a log, and of a block in a terminal.
const WIDTH: usize = 88;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = Args::parse();
    if args.prompts.is_empty() {
        args.prompts = PROMPTS.map(str::to_owned).to_vec();
    }
    let mut config = EngineConfig::default();
    config.max_sequences = args.prompts.len() as u32;
    let bar = ProgressBar::new(100).with_style(ProgressStyle::with_template("loading {bar:40} {percent}%")?);
    let engine =
        Engine::load_with_progress(&args.model, config, |share| bar.set_position((share * 100.0) as u64))?;
    bar.finish_and_clear();
    println!("{}, {} CPU threads\n", engine.model().description(), engine.thread_count());

    let together = run(&engine, &args, args.prompts.len())?;
    println!("\nThe same, one after another:\n");
    let alone = run(&engine, &args, 1)?;

    println!("\n{:<24}{:>12}{:>14}{:>20}", "", "tokens/s", "rows a step", "first token (mean)");
    for (name, result) in [("at once", &together), ("one after another", &alone)] {
        let (rate, rows) = (result.tokens_per_second(), result.metrics.mean_rows());
        let first = format!("{:.0} ms", result.mean_first_token().as_secs_f64() * 1e3);
        println!("{name:<24}{rate:>12.1}{rows:>14.2}{first:>20}");
    }
    println!("at once is {:.2} times as fast", together.tokens_per_second() / alone.tokens_per_second());
    Ok(())
}

struct Run {
    duration: Duration,
    outcomes: Vec<Outcome>,
    metrics: Metrics,
}

impl Run {
    fn tokens_per_second(&self) -> f64 {
        let tokens: u32 = self.outcomes.iter().map(|outcome| outcome.usage.completion_tokens).sum();
        f64::from(tokens) / self.duration.as_secs_f64()
    }

    fn mean_first_token(&self) -> Duration {
        let times = self.outcomes.iter().filter_map(|outcome| outcome.usage.time_to_first_token);
        times.sum::<Duration>() / self.outcomes.len().max(1) as u32
    }
}

/// Completes all prompts, so many at once, each shown as it comes.
fn run(engine: &Engine, args: &Args, at_once: usize) -> Result<Run, Box<dyn Error>> {
    let screen = MultiProgress::new();
    let before = engine.metrics();
    let started = Instant::now();
    let mut outcomes = Vec::new();
    for group in args.prompts.chunks(at_once) {
        let generations = group
            .iter()
            .enumerate()
            .map(|(index, prompt)| {
                let view = View::new(&screen, outcomes.len() + index + 1, prompt)?;
                let mut options = GenerateOptions::default();
                options.max_tokens = args.max_tokens;
                options.sampling.temperature = args.temperature;
                Ok((view, engine.generate(prompt.as_str(), options)?))
            })
            .collect::<Result<Vec<_>, Box<dyn Error>>>()?;
        let finished: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = generations
                .into_iter()
                .map(|(view, generation)| scope.spawn(|| show(view, generation)))
                .collect();
            threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
        });
        for outcome in finished {
            outcomes.extend(outcome.map_err(|_| "a thread that shows a completion has panicked")?);
        }
    }
    Ok(Run { duration: started.elapsed(), outcomes, metrics: engine.metrics().since(&before) })
}

fn show(mut view: View, mut generation: Generation) -> Option<Outcome> {
    for piece in &mut generation {
        view.push(&piece.text);
    }
    let outcome = generation.outcome().cloned();
    view.finish(outcome.as_ref());
    outcome
}

/// A completion on the screen: a block that grows in a terminal, prefixed lines elsewhere.
struct View {
    number: usize,
    block: Option<ProgressBar>,
    /// What the block shows, or what the next line begins with.
    text: String,
}

impl View {
    fn new(screen: &MultiProgress, number: usize, prompt: &str) -> Result<Self, Box<dyn Error>> {
        let block = std::io::stderr().is_terminal().then(|| screen.add(ProgressBar::new_spinner()));
        if let Some(block) = &block {
            block.set_style(ProgressStyle::with_template("{prefix:.bold}\n{msg}\n")?);
            block.set_prefix(format!("[{number}] {prompt}"));
        } else {
            println!("[{number}] > {prompt}");
        }
        Ok(Self { number, block, text: String::new() })
    }

    fn push(&mut self, piece: &str) {
        if let Some(block) = &self.block {
            self.text.push_str(piece);
            block.set_message(wrap(&self.text));
            return;
        }
        for character in piece.chars() {
            let full = self.text.chars().count() >= WIDTH && character.is_whitespace();
            if full || character == '\n' {
                self.print_line();
            } else {
                self.text.push(character);
            }
        }
    }

    fn print_line(&mut self) {
        if !self.text.trim().is_empty() {
            println!("[{}] {}", self.number, self.text);
        }
        self.text.clear();
    }

    fn finish(mut self, outcome: Option<&Outcome>) {
        let end = outcome.map_or_else(String::new, |outcome| {
            format!("{:?}, {} tokens", outcome.reason, outcome.usage.completion_tokens)
        });
        if let Some(block) = &self.block {
            block.finish_with_message(format!("{}\n({end})", wrap(&self.text)));
        } else {
            self.print_line();
            println!("[{}] ({end})", self.number);
        }
    }
}

/// Breaks lines at words.
fn wrap(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let mut column = 0;
        for word in line.split_inclusive(' ') {
            if column + word.chars().count() > WIDTH {
                out.push('\n');
                column = 0;
            }
            column += word.chars().count();
            out.push_str(word);
        }
        out.push('\n');
    }
    out.trim_end().to_owned()
}
