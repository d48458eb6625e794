//! Random hosts against the scheduler, with a model of the memory. What must always hold is checked at each step.

use super::*;
use crate::random::{Random, replayable, seeds};

const SEED: &str = "ENGINE_SIMULATION_SEED";
const SEEDS: u64 = 600;
const STEPS: usize = 400;

/// What a host and its sequence are up to.
#[derive(Debug, Default)]
struct Host {
    budget: u32,
    /// Tokens in the memory.
    memory: Vec<Token>,
    /// The prompt under way, and where it began.
    prompt: Option<(Vec<Token>, usize)>,
    /// Tokens sampled since the prompt; `None`: there is no completion.
    completion: Option<Vec<Token>>,
    asked: u32,
    /// Whether the last token ends generation.
    ended: bool,
    /// Steps that went well since the host waits, without anything for it.
    waiting: u32,
    /// Whether it sends prompts as long as they can be, also before the last one is done.
    floods: bool,
}

impl Host {
    fn sampled(&self) -> u32 {
        self.completion.as_ref().map_or(0, |tokens| tokens.len() as u32)
    }

    fn demands(&self) -> bool {
        self.prompt.is_some() || (self.completion.is_some() && self.asked > self.sampled())
    }

    fn void(&mut self) {
        self.prompt = None;
        self.completion = None;
        self.asked = 0;
        self.ended = false;
        self.waiting = 0;
    }
}

struct Simulation {
    random: Random,
    limits: Limits,
    scheduler: Scheduler,
    hosts: Vec<Option<Host>>,
    next_token: Token,
    /// How often a step fails: once in so many; 0: never.
    failures: u32,
    /// Steps that go well until there is something for whoever waits.
    patience: u32,
    tokens: u64,
    /// The prompt that is decoded elsewhere: its slot and arrival.
    lent: Option<(u32, u64)>,
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let max_sequences = 1 + random.below(8);
        let limits = Limits {
            max_sequences,
            window: 8 + random.below(120),
            batch: max_sequences + random.below(40),
            run_ahead: if random.once_in(2) { 0 } else { random.below(10) },
            straggler_window: Duration::from_micros(random.below(300).into()),
            prefill_step: Duration::from_millis(random.below(100).into()),
            prefill_stretch: 8.0 * random.unit(),
            kv_per_sequence: random.once_in(2),
        };
        let failures = [0, 3, 20][random.below(3) as usize];
        Self {
            failures,
            // Of a shared step that failed each sequence is tried alone first.
            patience: if failures > 0 { max_sequences + 1 } else { 1 },
            scheduler: Scheduler::new(limits.clone()),
            hosts: (0..max_sequences).map(|_| None).collect(),
            next_token: 0,
            tokens: 0,
            lent: None,
            random,
            limits,
        }
    }

    fn token(&mut self) -> Token {
        self.next_token += 1;
        self.next_token
    }

    /// Something happens to one of the hosts.
    fn act(&mut self) {
        let slot = self.random.below(self.limits.max_sequences);
        if self.hosts[slot as usize].is_none() {
            return self.create();
        }
        match self.random.below(24) {
            0 => {
                self.scheduler.destroy(slot);
                self.hosts[slot as usize] = None;
            }
            1 => self.with(slot, |scheduler, host, _| {
                scheduler.void(slot);
                host.void();
            }),
            2 => self.with(slot, |scheduler, host, random| {
                let keep = random.below(host.memory.len() as u32 + 1);
                scheduler.void(slot);
                scheduler.set_positions(slot, keep);
                host.void();
                host.memory.truncate(keep as usize);
            }),
            3 => self.rewind(slot),
            4..=9 => self.prompt(slot),
            _ => {
                let count = if self.random.once_in(4) { 1 + self.random.below(16) } else { 1 };
                self.with(slot, |scheduler, host, _| {
                    let possible = host.prompt.is_some() || host.completion.is_some();
                    // A host that asks for more than a bounded number of tokens is none that the protocol allows.
                    if host.asked <= host.sampled() || !possible {
                        assert_eq!(scheduler.ask(slot, count), possible, "slot {slot}");
                        host.asked = if possible { host.asked + count } else { 0 };
                        if !possible {
                            scheduler.void(slot);
                        }
                    }
                });
                self.refuse(slot);
            }
        }
    }

    fn with(&mut self, slot: u32, act: impl FnOnce(&mut Scheduler, &mut Host, &mut Random)) {
        if let Some(host) = &mut self.hosts[slot as usize] {
            act(&mut self.scheduler, host, &mut self.random);
        }
    }

    fn create(&mut self) {
        let budget = if self.random.once_in(2) { 0 } else { self.random.below(12) };
        let free = self.hosts.iter().position(Option::is_none);
        assert_eq!(self.scheduler.create(budget), free.map(|slot| slot as u32), "the lowest free slot");
        if let Some(slot) = free {
            let floods = self.random.once_in(3);
            self.hosts[slot] = Some(Host { budget, floods, ..Host::default() });
        }
    }

    fn prompt(&mut self, slot: u32) {
        let Some(host) = &self.hosts[slot as usize] else { return };
        let room = self.limits.window - host.memory.len() as u32;
        if room == 0 || (host.demands() && !host.floods) {
            return;
        }
        let length = if host.floods { room } else { 1 + self.random.below(room) };
        let tokens: Vec<Token> = (0..length).map(|_| self.token()).collect();
        self.with(slot, |scheduler, host, random| {
            scheduler.prompt(slot, tokens.clone());
            host.void();
            host.prompt = Some((tokens, host.memory.len()));
            if random.once_in(2) {
                assert!(scheduler.ask(slot, 1));
                host.asked = 1;
            }
        });
    }

    fn rewind(&mut self, slot: u32) {
        self.with(slot, |scheduler, host, random| {
            let Some(tokens) = &mut host.completion else { return };
            let consumed = random.below(host.asked.min(tokens.len() as u32) + 1);
            let kept = tokens.len().min(consumed.max(1) as usize);
            let undone = tokens.len() - kept;
            let positions = host.memory.len() - undone;
            let expected = (undone > 0).then_some(positions as u32);
            assert_eq!(scheduler.rewind(slot, consumed), expected, "slot {slot}");
            host.ended &= undone == 0;
            tokens.truncate(kept);
            host.memory.truncate(positions);
            host.asked = host.asked.min(consumed);
        });
    }

    /// Whoever waits for a token that has no room hears of it at once.
    fn refuse(&mut self, slot: u32) {
        let window = self.limits.window;
        self.with(slot, |scheduler, host, _| {
            let full = host.memory.len() as u32 >= window && host.prompt.is_none() && host.demands();
            assert_eq!(scheduler.take_out_of_room(slot), full, "slot {slot}");
            if full {
                host.asked = host.sampled();
                host.waiting = 0;
            }
        });
    }

    /// The rows are what the hosts' sequences need next, and no more than is allowed.
    fn check(&self) {
        let step = self.scheduler.step();
        assert!(!step.rows.is_empty() && step.rows.len() <= self.limits.batch as usize);
        assert!(step.rows.is_sorted_by_key(|row| (row.slot, row.position)));
        let mut rows = step.rows.iter();
        for part in &step.parts {
            let host = self.hosts[part.slot as usize].as_ref().expect("the sequence is alive");
            let held = host.memory.len();
            assert_eq!(part.prompt, host.prompt.is_some());
            let expected: &[Token] = match (&host.prompt, &host.completion) {
                (Some((tokens, start)), _) => &tokens[held - start..],
                (None, Some(tokens)) => {
                    assert!(self.may_go_on(host), "slot {} is further ahead than allowed", part.slot);
                    &tokens[tokens.len() - 1..]
                }
                (None, None) => panic!("slot {} has nothing to go on from", part.slot),
            };
            assert_eq!(part.output, part.rows as usize == expected.len());
            for offset in 0..part.rows as usize {
                let row = rows.next().expect("as many rows as the parts say");
                let output = offset + 1 == expected.len();
                let position = (held + offset) as u32;
                assert!(position < self.limits.window);
                assert_eq!(*row, Row { slot: part.slot, token: expected[offset], position, output });
            }
        }
        assert_eq!(rows.next(), None, "as many rows as the parts say");
        let outputs: Vec<_> = step.parts.iter().copied().filter(|part| part.output).collect();
        assert_eq!(step.outputs, outputs);
    }

    fn may_go_on(&self, host: &Host) -> bool {
        let sampled = host.sampled();
        let ahead = host.asked > 0
            && !host.ended
            && sampled < host.asked + self.limits.run_ahead
            && (host.budget == 0 || sampled < host.budget);
        host.asked > sampled || ahead
    }

    /// Lends a prompt out, or ends that.
    fn lend(&mut self) {
        let Some((slot, arrival)) = self.lent else {
            self.lent = self.scheduler.lend();
            return;
        };
        self.lent = None;
        self.scheduler.end_lending();
        if !self.scheduler.is_lent(slot, arrival) {
            return;
        }
        let tokens = self.scheduler.lent_tokens(slot).to_vec();
        self.with(slot, |scheduler, host, random| {
            if random.once_in(3) {
                return scheduler.take_back(slot);
            }
            let (prompt, start) = host.prompt.as_ref().expect("it has a prompt");
            let left = &prompt[host.memory.len() - start..];
            assert_eq!(tokens, left[..left.len() - 1], "slot {slot}");
            scheduler.returned(slot);
            host.memory.extend(tokens);
        });
    }

    fn is_lent(&self, slot: usize) -> bool {
        self.lent
            .is_some_and(|(lent, arrival)| lent as usize == slot && self.scheduler.is_lent(lent, arrival))
    }

    fn step(&mut self) {
        self.check();
        assert!(!self.scheduler.step().parts.iter().any(|part| self.is_lent(part.slot as usize)));
        let parts = self.scheduler.step().parts.clone();
        if self.failures > 0 && self.random.once_in(self.failures) {
            return self.fail(&parts);
        }
        let lent: Vec<_> = (0..self.hosts.len()).map(|slot| self.is_lent(slot)).collect();
        for (slot, host) in self.hosts.iter_mut().enumerate() {
            let Some(host) = host.as_mut().filter(|host| host.demands() && !lent[slot]) else { continue };
            host.waiting += 1;
            assert!(host.waiting <= self.patience, "slot {slot} starves: {host:?}");
        }
        let elapsed = Duration::from_micros(10 + u64::from(self.random.below(20_000)));
        self.scheduler.commit(elapsed);
        for part in parts {
            let rows = self.rows_of(part.slot);
            let token = self.token();
            let ends = self.random.once_in(30);
            self.with(part.slot, |scheduler, host, _| {
                host.memory.extend(rows);
                host.waiting = 0;
                if part.output {
                    scheduler.sampled(part.slot, token, ends);
                    host.prompt = None;
                    host.completion.get_or_insert_default().push(token);
                    host.ended = ends;
                    if ends {
                        host.asked = host.asked.min(host.sampled());
                    }
                }
            });
            self.tokens += u64::from(part.output);
            self.refuse(part.slot);
        }
    }

    fn rows_of(&self, slot: u32) -> Vec<Token> {
        let rows = self.scheduler.step().rows.iter();
        rows.filter(|row| row.slot == slot).map(|row| row.token).collect()
    }

    /// The decode fails; some of its first rows are in the memory, those of the last tokens are taken out again.
    fn fail(&mut self, parts: &[Part]) {
        let blame = !self.random.once_in(3);
        let mut kept = self.random.below(self.scheduler.step().rows.len() as u32 + 1);
        for part in parts {
            let finished = part.rows.min(kept);
            kept -= finished;
            let usable = if part.prompt { part.rows - u32::from(part.output) } else { 0 };
            let rows = self.rows_of(part.slot);
            let alone = parts.len() == 1;
            self.with(part.slot, |scheduler, host, _| {
                host.memory.extend(&rows[..finished.min(usable) as usize]);
                let ahead = !part.prompt && host.asked <= host.sampled();
                let expected = match (blame, alone) {
                    (true, true) if ahead => Failure::Ahead,
                    (true, true) => Failure::Fatal,
                    _ => Failure::Retry,
                };
                assert_eq!(scheduler.failed(part.slot, host.memory.len() as u32, blame), expected);
                match expected {
                    Failure::Fatal => host.void(),
                    Failure::Ahead => host.ended = true,
                    Failure::Retry => {}
                }
            });
        }
    }

    fn round(&mut self) {
        for _ in 0..self.random.below(4) {
            self.act();
        }
        if self.random.once_in(4) {
            self.lend();
        }
        let decision = match self.scheduler.plan(Duration::ZERO) {
            Decision::Wait(wait) if self.random.once_in(2) => self.scheduler.plan(wait),
            Decision::Wait(_) => return,
            decided => decided,
        };
        match decision {
            Decision::Run => self.step(),
            Decision::Idle => {
                let waits = |(slot, host): &(usize, &Option<Host>)| {
                    host.as_ref().is_some_and(Host::demands) && !self.is_lent(*slot)
                };
                let forgotten = self.hosts.iter().enumerate().find(waits);
                assert!(forgotten.is_none(), "idle, while somebody waits: {forgotten:?}");
            }
            Decision::Wait(left) => panic!("{left:?} left of a wait that is over"),
        }
        for (slot, host) in self.hosts.iter().enumerate() {
            let Some(host) = host else { continue };
            assert_eq!(self.scheduler.positions(slot as u32) as usize, host.memory.len(), "slot {slot}");
            assert_eq!(self.scheduler.history(slot as u32), host.completion.as_deref().unwrap_or_default());
        }
    }

    /// With nothing new and no failures everybody gets what was asked for, and then there is rest.
    fn settle(&mut self) {
        self.failures = 0;
        if self.lent.is_some() {
            self.lend();
        }
        let mut steps = 0;
        while self.scheduler.plan(Duration::MAX) == Decision::Run {
            self.step();
            steps += 1;
            assert!(steps < 10_000, "it never rests");
        }
        for host in self.hosts.iter().flatten() {
            assert!(!host.demands(), "unanswered: {host:?}");
            let allowed = host.asked.max(1) + self.limits.run_ahead;
            assert!(host.sampled() <= allowed, "{} tokens where {allowed} are allowed", host.sampled());
        }
    }
}

#[test]
fn random_hosts_find_the_scheduler_in_order() {
    let mut tokens = 0;
    for seed in seeds(SEED, SEEDS) {
        replayable(SEED, seed, |seed| {
            let mut simulation = Simulation::new(seed);
            for _ in 0..STEPS {
                simulation.round();
            }
            simulation.settle();
            tokens += simulation.tokens;
        });
    }
    println!("{tokens} tokens were sampled");
    assert!(tokens > 0);
}
