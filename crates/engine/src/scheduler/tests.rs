//! What is planned in each situation.

mod stragglers;

use super::*;

const STEP: Duration = Duration::from_millis(8);

fn limits() -> Limits {
    Limits {
        max_sequences: 4,
        window: 100,
        batch: 32,
        run_ahead: 0,
        straggler_window: Duration::ZERO,
        prefill_step: Duration::from_millis(25),
        prefill_stretch: 2.0,
        kv_per_sequence: false,
    }
}

/// A scheduler with a sequence in each slot, none of which has anything to do.
fn with_sequences(limits: Limits) -> Scheduler {
    let count = limits.max_sequences;
    let mut scheduler = Scheduler::new(limits);
    for slot in 0..count {
        assert_eq!(scheduler.create(0), Some(slot));
    }
    scheduler
}

/// What is planned next: slot, first position and number of each part's rows, in their order.
fn planned(scheduler: &mut Scheduler) -> Vec<(u32, u32, u32)> {
    if scheduler.plan(Duration::ZERO) != Decision::Run {
        return Vec::new();
    }
    let rows = &scheduler.step().rows;
    rows.chunk_by(|a, b| a.slot == b.slot)
        .map(|rows| (rows[0].slot, rows[0].position, rows.len() as u32))
        .collect()
}

/// Commits the planned step; each output samples the token 100 + slot.
fn commit(scheduler: &mut Scheduler, elapsed: Duration) {
    scheduler.commit(elapsed);
    for index in 0..scheduler.step().outputs.len() {
        let slot = scheduler.step().outputs[index].slot;
        scheduler.sampled(slot, 100 + slot as Token, false);
    }
}

/// Runs until nothing is left to do. Returns the number of steps.
fn run(scheduler: &mut Scheduler) -> usize {
    let mut steps = 0;
    while scheduler.plan(Duration::MAX) == Decision::Run {
        commit(scheduler, STEP);
        steps += 1;
        assert!(steps < 10_000, "it never rests");
    }
    steps
}

/// Sequences that have a prompt of `length` tokens, and whose hosts have taken the seed.
fn prompted(limits: Limits, slots: &[u32], length: usize) -> Scheduler {
    let mut scheduler = with_sequences(limits);
    for &slot in slots {
        scheduler.prompt(slot, vec![1; length]);
        assert!(scheduler.ask(slot, 1));
    }
    run(&mut scheduler);
    scheduler
}

#[test]
fn a_long_prompt_beside_a_stream_is_lent_but_for_its_last_token() {
    let mut scheduler = prompted(limits(), &[0], 4);
    scheduler.prompt(2, vec![1; 90]);
    assert_eq!(scheduler.lend(), None, "nobody streams");
    assert!(scheduler.ask(0, 9));
    scheduler.prompt(1, (0..80).collect());
    scheduler.prompt(3, vec![1; 3]);
    let (slot, arrival) = scheduler.lend().expect("the long prompt that came first");
    assert_eq!((slot, scheduler.lent_tokens(2).len()), (2, 89));
    assert!(
        scheduler.is_lent(2, arrival) && !scheduler.is_lent(2, arrival + 1) && !scheduler.is_lent(1, arrival)
    );
    let slots: Vec<_> = planned(&mut scheduler).into_iter().map(|(slot, ..)| slot).collect();
    assert_eq!(slots, [0, 1, 3], "what is lent is not decoded here");

    scheduler.returned(2);
    assert_eq!(scheduler.positions(2), 89);
    let parts = planned(&mut scheduler);
    assert!(parts.contains(&(2, 89, 1)), "{parts:?}");
    assert!(scheduler.step().outputs.iter().any(|part| part.slot == 2));

    let (_, arrival) = scheduler.lend().expect("the other long prompt");
    assert!(scheduler.is_lent(1, arrival));
    scheduler.take_back(1);
    assert!(!scheduler.is_lent(1, arrival) && planned(&mut scheduler).iter().any(|part| part.0 == 1));
    assert_eq!(scheduler.lend(), Some((1, arrival)));
    scheduler.void(1);
    assert!(!scheduler.is_lent(1, arrival), "it is void");
    scheduler.destroy(1);
    assert!(!scheduler.is_lent(1, arrival), "its sequence is gone");
}

#[test]
fn a_few_tokens_are_not_worth_the_copy_of_many() {
    let lent = |held: usize, rest: usize| {
        let limits = Limits { window: 10_000, ..limits() };
        let mut scheduler = prompted(limits, &[0], 4);
        scheduler.prompt(1, vec![1; held]);
        run(&mut scheduler);
        assert!(scheduler.ask(0, 9));
        scheduler.prompt(1, vec![1; rest]);
        scheduler.lend().is_some()
    };
    assert!(lent(800, 100) && lent(100, 100) && lent(1, 5000));
    assert!(!lent(808, 100), "an eighth of what it holds is more");
}

#[test]
fn while_a_prompt_is_lent_steps_are_taken_for_slower() {
    let limits = Limits { max_sequences: 3, batch: 512, window: 100_000, ..limits() };
    let mut scheduler = with_sequences(limits);
    scheduler.prompt(0, vec![1; 100]);
    planned(&mut scheduler);
    commit(&mut scheduler, Duration::from_micros(100) * 100);
    assert!(scheduler.ask(0, 99));
    planned(&mut scheduler);
    commit(&mut scheduler, STEP);
    scheduler.prompt(1, vec![1; 50_000]);
    scheduler.prompt(2, vec![1; 50_000]);
    assert_eq!(scheduler.lend().map(|lent| lent.0), Some(1));
    assert!(scheduler.is_streaming());
    assert_eq!(
        planned(&mut scheduler)[1],
        (2, 0, 47),
        "25 ms are 250 rows, and 62 with a quarter of the threads"
    );
    commit(&mut scheduler, STEP * 20);
    assert_eq!(planned(&mut scheduler)[1], (2, 47, 31), "it was too slow");
    commit(&mut scheduler, STEP * 20);
    scheduler.end_lending();
    assert_eq!(planned(&mut scheduler)[1].2, 191, "what was measured meanwhile says nothing of other times");
}

#[test]
fn nothing_to_do_is_idle() {
    let mut scheduler = with_sequences(limits());
    assert_eq!(scheduler.plan(Duration::ZERO), Decision::Idle);
    assert!(!scheduler.ask(0, 1), "there is nothing to go on from");
    assert_eq!(scheduler.plan(Duration::ZERO), Decision::Idle);
    scheduler.prompt(0, vec![1, 2]);
    run(&mut scheduler);
    assert_eq!(scheduler.plan(Duration::ZERO), Decision::Idle, "the seed was not taken");
}

#[test]
fn a_step_has_all_decode_rows_and_prompts_by_slot_and_position() {
    let mut scheduler = prompted(limits(), &[1, 3], 5);
    // Asked in another order than that of the slots.
    for slot in [3, 1] {
        assert!(scheduler.ask(slot, 1));
    }
    scheduler.prompt(2, vec![7, 8, 9]);
    scheduler.prompt(0, vec![4, 5]);
    assert_eq!(scheduler.plan(Duration::ZERO), Decision::Run);
    let row = |slot, token, position, output| Row { slot, token, position, output };
    assert_eq!(
        scheduler.step().rows,
        [
            row(0, 4, 0, false),
            row(0, 5, 1, true),
            row(1, 101, 5, true),
            row(2, 7, 0, false),
            row(2, 8, 1, false),
            row(2, 9, 2, true),
            row(3, 103, 5, true),
        ]
    );
    let part = |slot, rows, prompt| Part { slot, rows, prompt, output: true };
    let parts = [part(0, 2, true), part(1, 1, false), part(2, 3, true), part(3, 1, false)];
    assert_eq!(scheduler.step().parts, parts);
    assert_eq!(scheduler.step().outputs, parts);
}

#[test]
fn prompts_share_equally_and_what_short_ones_leave_goes_to_the_others() {
    let mut scheduler = with_sequences(limits());
    for (slot, length) in [(0, 60), (1, 3), (2, 60), (3, 10)] {
        scheduler.prompt(slot, vec![1; length]);
    }
    // 32 rows: 3 for the short one, and for the rest 9 or 10 each.
    assert_eq!(planned(&mut scheduler), [(0, 0, 10), (1, 0, 3), (2, 0, 10), (3, 0, 9)]);
    let outputs: Vec<_> = scheduler.step().outputs.iter().map(|part| part.slot).collect();
    assert_eq!(outputs, [1], "only a prompt's last row has logits");
    commit(&mut scheduler, STEP);
    assert_eq!(planned(&mut scheduler), [(0, 10, 15), (2, 10, 16), (3, 9, 1)]);
}

#[test]
fn a_step_never_has_more_rows_than_the_batch() {
    for batch in 4..12 {
        let mut scheduler = prompted(Limits { batch, ..limits() }, &[0, 2], 5);
        scheduler.prompt(1, vec![1; 50]);
        scheduler.prompt(3, vec![1; 50]);
        for _ in 0..5 {
            for slot in [0, 2] {
                assert!(scheduler.ask(slot, 1));
            }
            let parts = planned(&mut scheduler);
            assert_eq!(parts.iter().map(|part| part.2).sum::<u32>(), batch, "it is used, and no more");
            assert_eq!(parts.len(), 4, "everybody has a row");
            commit(&mut scheduler, STEP);
        }
    }
}

#[test]
fn where_there_is_not_a_row_for_each_prompt_the_oldest_go_first() {
    let limits = Limits { max_sequences: 40, batch: 64, window: 1000, ..limits() };
    let mut scheduler = prompted(limits, &[39], 5);
    assert!(scheduler.ask(39, 1));
    assert_eq!(run(&mut scheduler), 1);
    // Steps with a prompt in them take so long that prompts get the least, 16 rows.
    scheduler.prompt(38, vec![1; 500]);
    for rows in [63, 47, 31, 23] {
        assert!(scheduler.ask(39, 1));
        let parts = planned(&mut scheduler);
        assert_eq!((parts[0].0, parts[0].2), (38, rows));
        commit(&mut scheduler, STEP * 100);
    }
    scheduler.void(38);
    scheduler.set_positions(38, 0);
    for slot in (0..39).rev() {
        scheduler.prompt(slot, vec![1; 2]);
    }
    assert!(scheduler.ask(39, 1));
    let mut expected: Vec<_> = (23..39).map(|slot| (slot, 0, 1)).collect();
    expected.push((39, scheduler.positions(39), 1));
    assert_eq!(planned(&mut scheduler), expected, "the sixteen that came first");
}

#[test]
fn a_chunk_beside_others_follows_the_measured_time() {
    let rows_after = |elapsed: Duration, kv_per_sequence: bool| {
        let limits = Limits { max_sequences: 2, batch: 512, window: 100_000, kv_per_sequence, ..limits() };
        let mut scheduler = prompted(limits, &[0], 5);
        assert!(scheduler.ask(0, 1));
        assert_eq!(planned(&mut scheduler), [(0, 5, 1)]);
        commit(&mut scheduler, STEP);
        scheduler.prompt(1, vec![1; 50_000]);
        let mut rows = Vec::new();
        for _ in 0..30 {
            assert!(scheduler.ask(0, 1));
            let parts = planned(&mut scheduler);
            rows.push(parts[1].2);
            commit(&mut scheduler, elapsed);
        }
        rows
    };
    let at_pace = rows_after(Duration::from_millis(25), false);
    assert_eq!(at_pace, [63; 30], "as long as it should be, and the step as large as before");
    let fast = rows_after(STEP, false);
    assert_eq!(fast[..7], [63, 95, 127, 191, 255, 383, 511], "sizes that a step's graph is made for once");
    assert_eq!(fast[7..], [511; 23], "a batch");
    let slow = rows_after(STEP * 20, false);
    assert_eq!(slow[..5], [63, 47, 31, 23, 16]);
    assert_eq!(slow[5..], [16; 25], "the least");
    let split = rows_after(STEP, true);
    assert_eq!(split[..7], [65, 97, 129, 193, 257, 385, 511], "its first row shares the others' ubatch");
}

#[test]
fn the_first_chunk_beside_others_follows_from_a_prompt_alone() {
    let first = |row: Duration| {
        let limits = Limits { max_sequences: 2, batch: 512, window: 100_000, ..limits() };
        let mut scheduler = with_sequences(limits);
        scheduler.prompt(0, vec![1; 100]);
        assert_eq!(planned(&mut scheduler), [(0, 0, 100)]);
        commit(&mut scheduler, row * 100);
        assert!(scheduler.ask(0, 3));
        assert_eq!(planned(&mut scheduler), [(0, 100, 1)]);
        commit(&mut scheduler, STEP);
        scheduler.prompt(1, vec![1; 50_000]);
        planned(&mut scheduler)[1].2
    };
    assert_eq!(first(Duration::from_micros(10)), 511, "a batch");
    assert_eq!(first(Duration::from_micros(100)), 191, "25 ms are 250 rows");
    assert_eq!(first(Duration::from_millis(10)), 16, "the least");
}

#[test]
fn a_prompt_alone_takes_no_longer_than_somebody_may_wait() {
    let limits = Limits { max_sequences: 2, batch: 512, window: 100_000, ..limits() };
    let mut scheduler = with_sequences(limits);
    scheduler.prompt(0, vec![1; 50_000]);
    let mut rows = Vec::new();
    for _ in 0..20 {
        rows.push(planned(&mut scheduler)[0].2);
        let elapsed = Duration::from_millis(1) * rows[rows.len() - 1];
        commit(&mut scheduler, elapsed);
    }
    assert_eq!(rows[0], 512, "before it is measured");
    assert_eq!(rows[1..], [192; 19], "a millisecond a row, and no more than 200 of them");
}

/// The tokens that are sampled if the host has asked for `asked`.
fn sampled(limits: Limits, budget: u32, asked: u32) -> u32 {
    let mut scheduler = Scheduler::new(limits);
    let slot = scheduler.create(budget).expect("a slot");
    scheduler.prompt(slot, vec![1; 5]);
    if asked > 0 {
        assert!(scheduler.ask(slot, asked));
    }
    run(&mut scheduler);
    assert_eq!(scheduler.positions(slot), 5 + scheduler.history(slot).len() as u32 - 1);
    scheduler.history(slot).len() as u32
}

#[test]
fn what_is_sampled_ahead_has_bounds() {
    for run_ahead in [0, 1, 4, 64] {
        let limits = Limits { run_ahead, ..limits() };
        assert_eq!(sampled(limits.clone(), 0, 0), 1, "only the seed before the host asks");
        assert_eq!(sampled(limits.clone(), 0, 1), 1 + run_ahead);
        assert_eq!(sampled(limits.clone(), 0, 7), 7 + run_ahead);
        assert_eq!(sampled(limits.clone(), 3, 1), 1 + run_ahead.min(2), "not past the budget");
        assert_eq!(sampled(limits.clone(), 3, 7), 7, "the budget does not bound what is asked for");
        let limits = Limits { window: 8, ..limits };
        assert_eq!(sampled(limits.clone(), 0, 1), 1 + run_ahead.min(3), "not past the window");
        assert_eq!(sampled(limits, 0, 50), 4, "whatever is asked for");
    }
}

#[test]
fn a_completion_that_has_ended_goes_on_only_if_it_is_asked_for() {
    let mut scheduler = prompted(Limits { run_ahead: 4, ..limits() }, &[], 0);
    scheduler.prompt(0, vec![1; 5]);
    assert!(scheduler.ask(0, 2));
    for (token, ends) in [(50, false), (51, true)] {
        assert_eq!(scheduler.plan(Duration::ZERO), Decision::Run);
        scheduler.commit(STEP);
        scheduler.sampled(0, token, ends);
    }
    assert_eq!(scheduler.plan(Duration::ZERO), Decision::Idle);
    assert_eq!(scheduler.ahead(0), 0);
    assert!(scheduler.ask(0, 1));
    assert_eq!(run(&mut scheduler), 5, "the one that is asked for, and four ahead");
    assert_eq!(scheduler.ahead(0), 4);
}

#[test]
fn a_rewind_forgets_what_the_host_has_not_taken() {
    let mut scheduler = with_sequences(Limits { run_ahead: 4, ..limits() });
    scheduler.prompt(0, vec![1; 5]);
    assert!(scheduler.ask(0, 3));
    assert_eq!(run(&mut scheduler), 7);
    assert_eq!((scheduler.positions(0), scheduler.ahead(0)), (11, 4));
    assert_eq!(scheduler.rewind(0, 2), Some(6), "the last of two tokens is not in the memory");
    assert_eq!((scheduler.positions(0), scheduler.ahead(0)), (6, 0));
    assert_eq!(scheduler.rewind(0, 2), None, "there is nothing more to forget");
    assert_eq!(planned(&mut scheduler), [(0, 6, 1)], "it goes on from there");
    run(&mut scheduler);
    assert_eq!(scheduler.history(0).len(), 6);
    assert_eq!(scheduler.rewind(0, 0), Some(5), "the seed stays");
    assert_eq!(scheduler.history(0).len(), 1);
    assert_eq!(scheduler.plan(Duration::ZERO), Decision::Idle, "the host has asked for nothing now");
}

#[test]
fn a_rewind_behind_the_end_goes_on() {
    let mut scheduler = with_sequences(Limits { run_ahead: 4, ..limits() });
    scheduler.prompt(0, vec![1; 5]);
    assert!(scheduler.ask(0, 1));
    for (token, ends) in [(50, false), (51, true)] {
        assert_eq!(scheduler.plan(Duration::ZERO), Decision::Run);
        scheduler.commit(STEP);
        scheduler.sampled(0, token, ends);
    }
    assert_eq!(scheduler.plan(Duration::ZERO), Decision::Idle);
    assert_eq!(scheduler.rewind(0, 1), Some(5));
    assert_eq!(planned(&mut scheduler), [(0, 5, 1)]);
}

#[test]
fn who_waits_for_a_token_in_a_full_window_is_told_once() {
    let mut scheduler = with_sequences(Limits { window: 6, ..limits() });
    scheduler.prompt(0, vec![1; 5]);
    assert!(scheduler.ask(0, 2));
    assert!(!scheduler.take_out_of_room(0), "there is room for one");
    run(&mut scheduler);
    assert!(!scheduler.take_out_of_room(0), "nothing more is asked for");
    assert!(scheduler.ask(0, 9));
    assert_eq!(scheduler.plan(Duration::ZERO), Decision::Idle);
    assert!(scheduler.take_out_of_room(0));
    assert!(!scheduler.take_out_of_room(0));
    assert_eq!(scheduler.history(0).len(), 2, "what was sampled is there");
}

#[test]
fn slots_are_dense_and_used_again() {
    let mut scheduler = with_sequences(limits());
    assert_eq!(scheduler.create(0), None);
    scheduler.prompt(2, vec![1; 5]);
    assert!(scheduler.ask(2, 1));
    run(&mut scheduler);
    scheduler.destroy(2);
    scheduler.destroy(1);
    assert_eq!(scheduler.create(0), Some(1), "the lowest");
    assert_eq!(scheduler.create(0), Some(2));
    assert_eq!(
        (scheduler.positions(2), scheduler.history(2)),
        (0, &[][..]),
        "nothing of the last one is left"
    );
    assert!(!scheduler.ask(2, 1));
}
