//! Who is waited for, and for how long.

use super::*;

#[test]
fn a_step_waits_for_who_is_expected_and_only_then() {
    let window = Duration::from_micros(200);
    let limits = Limits { straggler_window: window, ..limits() };
    let mut scheduler = prompted(limits.clone(), &[0, 1], 5);
    // Both have taken their seeds: each is expected, but nobody waits for a token.
    assert_eq!(scheduler.plan(Duration::ZERO), Decision::Idle);
    assert!(scheduler.ask(0, 1));
    let Decision::Wait(wait) = scheduler.plan(Duration::ZERO) else { panic!("1 is expected") };
    assert_eq!(wait, window, "before a step is measured");
    assert_eq!(scheduler.plan(window / 4), Decision::Wait(window * 3 / 4));
    assert!(scheduler.ask(1, 1));
    assert_eq!(scheduler.plan(window / 2), Decision::Run, "all have asked");
    assert_eq!(scheduler.step().rows.len(), 2);
    commit(&mut scheduler, STEP);

    // From now on it is an eighth of a step, but no more than ten windows.
    assert!(scheduler.ask(0, 1));
    assert_eq!(scheduler.plan(Duration::ZERO), Decision::Wait(STEP / 8));
    assert_eq!(scheduler.plan(STEP / 8), Decision::Run, "no longer than the window");
    commit(&mut scheduler, STEP * 1000);
    assert!(scheduler.ask(0, 1));
    assert_eq!(scheduler.plan(Duration::ZERO), Decision::Wait(window * 10));
    assert_eq!(scheduler.plan(window * 10), Decision::Run);
    commit(&mut scheduler, STEP);
    // It was missed twice.
    assert!(scheduler.ask(0, 1));
    assert_eq!(scheduler.plan(Duration::ZERO), Decision::Run);
    commit(&mut scheduler, STEP);
    // Once it asks it is expected again.
    assert!(scheduler.ask(1, 1));
    assert!(scheduler.ask(0, 1));
    assert_eq!(scheduler.plan(Duration::ZERO), Decision::Run);
    commit(&mut scheduler, STEP);
    assert!(scheduler.ask(0, 1));
    assert!(matches!(scheduler.plan(Duration::ZERO), Decision::Wait(_)));
}

#[test]
fn completions_that_begin_together_go_on_together() {
    let window = Duration::from_micros(200);
    for run_ahead in [0, 4] {
        let limits = Limits { straggler_window: window, run_ahead, ..limits() };
        let mut scheduler = Scheduler::new(limits);
        for slot in 0..3 {
            assert_eq!(scheduler.create(0), Some(slot));
            scheduler.prompt(slot, vec![1; 5]);
        }
        run(&mut scheduler);
        assert_eq!(scheduler.plan(Duration::ZERO), Decision::Idle, "nobody has begun");
        // A host takes its seed with its first token, or before.
        assert!(scheduler.ask(0, 2));
        assert_eq!(scheduler.plan(Duration::ZERO), Decision::Wait(window));
        assert!(scheduler.ask(2, 2));
        assert_eq!(scheduler.plan(window / 2), Decision::Wait(window / 2), "1 may begin as well");
        assert_eq!(scheduler.plan(window), Decision::Run);
        assert_eq!(scheduler.step().rows.len(), 2);
        commit(&mut scheduler, STEP);
        // Nobody who has begun waits for a beginner.
        assert!(scheduler.ask(0, 1) && scheduler.ask(2, 1));
        assert_eq!(scheduler.plan(Duration::ZERO), Decision::Run);
        commit(&mut scheduler, STEP);
        assert!(scheduler.ask(0, 1) && scheduler.ask(2, 1) && scheduler.ask(1, 2));
        assert_eq!(scheduler.plan(Duration::ZERO), Decision::Run);
        assert_eq!(scheduler.step().rows.len(), 3);
    }
}

#[test]
fn nobody_waits_for_who_is_not_expected() {
    let window = Duration::from_micros(200);
    let waits = |limits: Limits, change: fn(&mut Scheduler)| {
        let mut scheduler = prompted(limits, &[0, 1], 5);
        change(&mut scheduler);
        assert!(scheduler.ask(0, 1));
        matches!(scheduler.plan(Duration::ZERO), Decision::Wait(_))
    };
    let limits = Limits { straggler_window: window, ..limits() };
    assert!(waits(limits.clone(), |_| {}));
    assert!(!waits(Limits { straggler_window: Duration::ZERO, ..limits.clone() }, |_| {}), "it is off");
    assert!(!waits(Limits { run_ahead: 1, ..limits.clone() }, |_| {}), "it is sampled ahead");
    assert!(!waits(limits.clone(), |scheduler| scheduler.void(1)), "it was cancelled");
    assert!(!waits(limits.clone(), |scheduler| scheduler.destroy(1)), "it is gone");
    assert!(!waits(Limits { window: 5, ..limits.clone() }, |_| {}), "it has no room");
    let ended = |scheduler: &mut Scheduler| {
        assert!(scheduler.ask(1, 1));
        assert_eq!(scheduler.plan(Duration::MAX), Decision::Run);
        scheduler.commit(STEP);
        scheduler.sampled(1, 3, true);
    };
    assert!(!waits(limits, ended), "its completion has ended");
}
