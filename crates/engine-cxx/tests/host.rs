//! The bridge from its Rust side: what C++ calls, without C++.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use engine_cxx::bridge::ffi::{Options, Sample, Sampling, Status};
use engine_cxx::host::Host;
use fixtures::SmallModel;

const OPTIONS: Options = Options {
    gpu_layers: -1,
    context_window_tokens: 2048,
    batch_size: 128,
    max_sequences: 4,
    thread_count: 1,
    run_ahead_tokens: 4,
};

const GREEDY: Sampling = Sampling {
    max_prediction_tokens: 0,
    temperature: 0.0,
    top_k: 0,
    top_p: 0.0,
    min_p: 0.0,
    repetition_penalty: 0.0,
    seed: 0,
    single_line: false,
};

fn path() -> Vec<u8> {
    fixtures::small(SmallModel::Full).into_os_string().into_encoded_bytes()
}

fn loaded() -> Host {
    let host = Host::default();
    assert_eq!(host.load_model(&path(), &OPTIONS), Status::Ok, "{}", host.last_error());
    host
}

fn sequence(host: &Host) -> i32 {
    let id = host.create_sequence(&GREEDY);
    assert!(id > 0, "{}", host.last_error());
    id
}

fn sample(host: &Host, id: i32, count: usize) -> Vec<Sample> {
    (0..count).map(|_| host.sample_next(id)).collect()
}

#[test]
fn a_host_without_a_model_answers_everything() {
    let host = Host::default();
    host.unload_model();
    assert!(!host.is_model_loaded());
    assert_eq!(host.load_model(b"/nonexistent/model.gguf", &OPTIONS), Status::Error);
    assert!(host.last_error().contains("/nonexistent/model.gguf"), "{}", host.last_error());
    assert_eq!(host.create_sequence(&GREEDY), -1);
    assert_eq!(host.decode_prompt(1, &[1], 0), Status::NotLoaded);
    let sample = host.sample_next(1);
    assert!(sample.is_eos && !sample.was_cancelled && sample.piece.is_empty());
    assert!(!host.trim(1, 0));
    assert_eq!(host.position_count(1), 0);
    assert!(host.tokenize(b"text", true, true).is_empty());
    assert!(host.token_text(1).is_empty() && host.token_piece(1).is_empty());
    assert!(!host.has_chat_template());
    assert!(host.apply_chat_template(None, b"text", true).is_empty());
    assert_eq!(host.loaded().context_window_tokens, 0);
    host.cancel_sequence(1);
    host.destroy_sequence(1);
}

#[test]
fn options_are_checked_before_the_loaded_model_goes() {
    let host = loaded();
    let id = sequence(&host);
    for wrong in [
        Options { context_window_tokens: 7, ..OPTIONS },
        Options { context_window_tokens: i32::MAX, ..OPTIONS },
        Options { batch_size: 0, ..OPTIONS },
        Options { batch_size: -1, ..OPTIONS },
        Options { max_sequences: 0, ..OPTIONS },
        Options { max_sequences: 257, ..OPTIONS },
        Options { thread_count: -1, ..OPTIONS },
        Options { run_ahead_tokens: 65, ..OPTIONS },
    ] {
        assert_eq!(host.load_model(&path(), &wrong), Status::Error, "{wrong:?}");
        assert!(host.last_error().contains("must be"), "{}", host.last_error());
    }
    assert_eq!(host.decode_prompt(id, &[5, 6, 7], 0), Status::Ok);
    let narrow = Options { batch_size: 2, ..OPTIONS };
    assert_eq!(host.load_model(&path(), &narrow), Status::Ok);
    assert_eq!(host.loaded().batch_size, 4);
}

#[test]
fn log_probabilities_are_on_until_they_are_turned_off() {
    let host = loaded();
    let (on, off) = (sequence(&host), sequence(&host));
    host.set_compute_logprob(off, false);
    let prompt = host.tokenize(b"The quick brown fox", true, false);
    for id in [on, off] {
        assert_eq!(host.decode_prompt(id, &prompt, 0), Status::Ok);
    }
    let (on, off) = (sample(&host, on, 6), sample(&host, off, 6));
    assert!(on.iter().all(|sample| sample.logprob.is_finite() && sample.logprob <= 0.0));
    assert!(on.iter().any(|sample| sample.logprob < 0.0));
    assert!(off.iter().all(|sample| sample.logprob == 0.0));
    let tokens = |samples: &[Sample]| samples.iter().map(|sample| sample.token).collect::<Vec<_>>();
    assert_eq!(tokens(&on), tokens(&off));
}

#[test]
fn pieces_outlive_their_model() {
    let host = loaded();
    let id = sequence(&host);
    let prompt = host.tokenize(b"Once upon a time", true, false);
    assert_eq!(host.decode_prompt(id, &prompt, 0), Status::Ok);
    let samples = sample(&host, id, 8);
    let texts: Vec<_> = samples.iter().map(|sample| host.token_text(sample.token)).collect();
    host.unload_model();
    let pieces: Vec<_> = samples.iter().map(|sample| sample.piece.to_vec()).collect();
    assert_eq!(pieces, texts);
}

#[test]
fn a_cancel_does_not_wait_for_the_call_that_it_ends() {
    let host = loaded();
    let id = sequence(&host);
    let prompt = vec![5; 2000];
    let begun = Barrier::new(2);
    thread::scope(|scope| {
        let decoding = scope.spawn(|| {
            begun.wait();
            host.decode_prompt(id, &prompt, 0)
        });
        begun.wait();
        thread::sleep(Duration::from_millis(1));
        host.cancel_sequence(id);
        assert_eq!(decoding.join().expect("a call does not panic"), Status::Cancelled);
    });
    assert!(host.sample_next(id).was_cancelled);
    assert!(host.trim(id, 0));
    assert_eq!(host.decode_prompt(id, &prompt[..4], 0), Status::Ok);
    assert!(!host.sample_next(id).was_cancelled);
}

#[test]
fn unloading_ends_what_is_in_flight() {
    let host = loaded();
    let id = sequence(&host);
    let prompt = vec![5; 2000];
    let begun = Barrier::new(2);
    thread::scope(|scope| {
        let decoding = scope.spawn(|| {
            begun.wait();
            host.decode_prompt(id, &prompt, 0)
        });
        begun.wait();
        thread::sleep(Duration::from_millis(1));
        host.unload_model();
        assert_eq!(decoding.join().expect("a call does not panic"), Status::NotLoaded);
    });
    assert!(host.sample_next(id).is_eos);
    assert_eq!(host.load_model(&path(), &OPTIONS), Status::Ok);
    assert!(sequence(&host) > id);
}

#[test]
fn waiting_calls_find_a_destroyed_sequence_gone() {
    let host = loaded();
    let id = sequence(&host);
    let prompt = vec![5; 2000];
    thread::scope(|scope| {
        let calls: Vec<_> = (0..3).map(|_| scope.spawn(|| host.decode_prompt(id, &prompt, 0))).collect();
        thread::sleep(Duration::from_millis(1));
        host.destroy_sequence(id);
        for call in calls {
            assert_ne!(call.join().expect("a call does not panic"), Status::NotLoaded);
        }
    });
    assert_eq!(host.decode_prompt(id, &prompt, 0), Status::Error);
    let ids: Vec<_> = (0..4).map(|_| sequence(&host)).collect();
    assert_eq!(ids.len(), 4);
}

#[test]
fn chat_messages_are_text() {
    let host = loaded();
    assert!(host.has_chat_template());
    let rendered = host.apply_chat_template(Some(b"Be brief."), b"Hello", true);
    let rendered = String::from_utf8(rendered).expect("the template is text");
    assert!(rendered.contains("Be brief.") && rendered.contains("Hello"), "{rendered}");
    assert!(host.apply_chat_template(None, b"\xff", true).is_empty());
    assert!(host.last_error().contains("UTF-8"));
}
