//! Models that cannot be loaded and settings that cannot be; and beside each a sequence whose tokens do not change.
#![allow(missing_docs)]

mod common;

use std::fs;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use common::{beside_a_neighbour, config, file, find, full, full_bytes};
use engine::{ConfigError, Engine, EngineConfig, FlashAttention, KvType, LoadError};
use fixtures::SmallModel;

/// What is wrong with a model of these bytes.
fn refused(name: &str, bytes: &[u8]) -> LoadError {
    let path = file(name, bytes);
    let result = Engine::load(&path, config());
    let _ = fs::remove_file(&path);
    result.map(drop).expect_err(name)
}

/// A copy with other numbers: a key is followed by its value's type, which is 4, and the value.
fn with_numbers(numbers: &[(&str, u32)]) -> Vec<u8> {
    let mut bytes = full_bytes();
    for (key, number) in numbers {
        let key = [key.as_bytes(), &[4, 0, 0, 0]].concat();
        let value = find(&bytes, &key) + key.len();
        bytes[value..value + 4].copy_from_slice(&number.to_le_bytes());
    }
    bytes
}

/// A copy with another architecture, whose name is as long as `llama`.
fn with_architecture(name: &str) -> Vec<u8> {
    let mut bytes = full_bytes();
    let value = find(&bytes, b"general.architecture") + "general.architecture".len() + 4 + 8;
    assert_eq!(&bytes[value..value + 5], b"llama");
    bytes[value..value + 5].copy_from_slice(name.as_bytes());
    for start in 0..bytes.len() - 6 {
        if &bytes[start..start + 6] == b"llama." {
            bytes[start..start + 5].copy_from_slice(name.as_bytes());
        }
    }
    bytes
}

/// A copy of a model with another architecture, whose name is longer. GGUF writes a string's length before it, as 8 bytes; the
/// tensors begin at a multiple of 32.
fn with_longer_architecture(model: &[u8], from: &str, to: &str) -> Vec<u8> {
    let longer = to.len() - from.len();
    let mut bytes = model.to_vec();
    let lengthen = |bytes: &mut Vec<u8>, string: usize, by: usize, with: &[u8], replaced: usize| {
        let length = u64::from_le_bytes(bytes[string - 8..string].try_into().expect("8 bytes"));
        bytes[string - 8..string].copy_from_slice(&(length + by as u64).to_le_bytes());
        bytes.splice(string..string + replaced, with.iter().copied());
    };
    let name = find(&bytes, b"general.architecture") + "general.architecture".len() + 4 + 8;
    lengthen(&mut bytes, name, longer, to.as_bytes(), from.len());
    let prefix = format!("{from}.");
    let mut at = name + to.len();
    while let Some(next) = bytes[at..].windows(prefix.len()).position(|window| window == prefix.as_bytes()) {
        lengthen(&mut bytes, at + next, longer, to.as_bytes(), from.len());
        at += next + to.len();
    }
    let name = find(&bytes, b"general.name") + "general.name".len() + 4 + 8;
    let grown = bytes.len() - model.len();
    let left = grown.next_multiple_of(32) - grown;
    lengthen(&mut bytes, name, left, &vec![b'-'; left], 0);
    bytes
}

#[test]
fn a_model_that_makes_embeddings_is_refused() {
    let engine = full().load(|_| {});
    let sliding = fs::read(fixtures::small(SmallModel::Sliding)).expect("the committed model");
    let models = [(&sliding, "gemma3", "gemma-embedding"), (&full_bytes(), "llama", "llama-embed")];
    beside_a_neighbour(&engine, || {
        for (bytes, from, to) in models {
            let error = refused(to, &with_longer_architecture(bytes, from, to));
            assert!(matches!(error, LoadError::NotGenerative { .. }), "{to}: {error:?}");
        }
    });
}

#[test]
fn what_llama_cpp_refuses_is_said_as_it_is() {
    // Heads of 16 values have no whole blocks of 32.
    let heads = [
        ("llama.attention.head_count", 16),
        ("llama.attention.head_count_kv", 4),
        ("llama.attention.key_length", 16),
        ("llama.attention.value_length", 16),
        ("llama.rope.dimension_count", 16),
    ];
    let path = file("small-heads", &with_numbers(&heads));
    Engine::load(&path, config()).map(drop).expect("as it is, it loads");
    let sets: [fn(&mut EngineConfig); 2] =
        [|config| config.kv_type_k = KvType::Q8_0, |config| config.kv_type_v = KvType::Q8_0];
    for set in sets {
        let mut config = config();
        set(&mut config);
        let error = Engine::load(&path, config).map(drop).expect_err("it cannot be");
        assert!(matches!(&error, LoadError::Refused { reason } if reason.contains("q8_0")), "{error:?}");
    }
    let _ = fs::remove_file(path);
}

#[test]
fn a_file_that_is_no_model_is_refused_with_what_is_wrong() {
    let engine = full().load(|_| {});
    let whole = full_bytes();
    beside_a_neighbour(&engine, || {
        let missing = PathBuf::from("no/such/model.gguf");
        for path in [missing, PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from("a\0b")] {
            let error = Engine::load(&path, config()).map(drop).expect_err("there is no such file");
            assert!(matches!(&error, LoadError::Unreadable { path: of, .. } if *of == path), "{error:?}");
        }
        for (name, bytes, begin) in
            [("empty", &b""[..], &b""[..]), ("short", b"GG", b"GG"), ("text", b"hello", b"hell")]
        {
            let error = refused(name, bytes);
            assert!(matches!(&error, LoadError::NotGguf { found, .. } if found == begin), "{error:?}");
        }
        for length in [whole.len() / 2, whole.len() - 1] {
            let error = refused("truncated", &whole[..length]);
            let LoadError::Truncated { actual, needed, .. } = error else { panic!("{error:?}") };
            assert!(actual == length as u64 && actual < needed && needed <= whole.len() as u64, "{needed}");
        }
        for length in [4, 6, 24, 100, 2000] {
            let error = refused("cut", &whole[..length]);
            assert!(matches!(&error, LoadError::Damaged { reason, .. } if !reason.is_empty()), "{error:?}");
        }
    });
}

#[test]
fn a_model_that_cannot_be_used_is_refused_with_what_it_is() {
    let engine = full().load(|_| {});
    beside_a_neighbour(&engine, || {
        let error = refused("unknown", &with_architecture("lhama"));
        assert!(
            matches!(&error, LoadError::UnknownArchitecture { architecture, .. } if architecture == "lhama"),
            "{error:?}"
        );
        let error = refused("diffusion", &with_architecture("llada"));
        assert!(matches!(&error, LoadError::NotGenerative { .. }), "{error:?}");
        for blocks in [0, 513, 100_000, u32::MAX] {
            let error = refused("blocks", &with_numbers(&[("llama.block_count", blocks)]));
            assert!(
                matches!(&error, LoadError::Damaged { reason, .. } if reason.contains("blocks")),
                "{error:?}"
            );
        }
        let bytes = with_numbers(&[("llama.embedding_length", 96)]);
        let error = refused("other-shape", &bytes);
        assert!(matches!(&error, LoadError::Damaged { reason, .. } if !reason.is_empty()), "{error:?}");
    });
}

/// Runs this test again in a process that may not have as much memory, so that no machine is brought to its limit.
#[cfg(target_os = "linux")]
#[test]
fn a_context_without_memory_is_refused() {
    const LIMITED: &str = "ENGINE_TEST_MEMORY_IS_LIMITED";
    const LIMIT_KIB: u32 = 3_000_000;
    // 2 KiB of keys and values a token, 4 GiB for four sequences.
    const WINDOW: u32 = 1 << 20;
    if std::env::var_os(LIMITED).is_none() {
        let test = std::env::current_exe().expect("the test's own file");
        let status = std::process::Command::new("sh")
            .args(["-c", &format!("ulimit -v {LIMIT_KIB} && exec \"$0\" \"$@\"")])
            .arg(test)
            .args(["--exact", "a_context_without_memory_is_refused", "--nocapture"])
            .env(LIMITED, "1")
            .status();
        assert!(status.expect("a shell").success(), "with {LIMIT_KIB} KiB of memory");
        return;
    }
    let engine = full().load(|_| {});
    beside_a_neighbour(&engine, || {
        let mut config = config();
        config.context_window = WINDOW;
        let error = Engine::load(full().path, config).map(drop).expect_err("more than there may be");
        let LoadError::OutOfMemory { sequences, context_window, reason } = error else {
            panic!("{error:?}");
        };
        assert_eq!((sequences, context_window), (4, WINDOW));
        assert!(!reason.is_empty());
    });
}

#[test]
fn every_setting_out_of_its_range_is_named() {
    type Set = fn(&mut EngineConfig);
    const WHOLE: [(&str, Set); 19] = [
        ("max_sequences", |c| c.max_sequences = 0),
        ("max_sequences", |c| c.max_sequences = engine::MAX_SEQUENCES + 1),
        ("context_window", |c| c.context_window = 7),
        ("context_window", |c| c.context_window = engine::MAX_CONTEXT_TOKENS / 4 + 1),
        ("batch_size", |c| c.batch_size = 3),
        ("batch_size", |c| c.batch_size = (1 << 20) + 1),
        ("ubatch_size", |c| c.ubatch_size = Some(3)),
        ("ubatch_size", |c| c.ubatch_size = Some(129)),
        ("main_device", |c| c.main_device = 1024),
        ("threads", |c| c.threads = NonZeroU32::new(513)),
        ("sampling_threads", |c| c.sampling_threads = NonZeroU32::new(65)),
        ("prefill_step", |c| c.prefill_step = Some(Duration::ZERO)),
        ("prefill_step", |c| c.prefill_step = Some(Duration::MAX)),
        ("run_ahead", |c| c.run_ahead = engine::MAX_RUN_AHEAD + 1),
        ("queue_capacity", |c| c.queue_capacity = 0),
        ("queue_capacity", |c| c.queue_capacity = (1 << 20) + 1),
        ("straggler_window", |c| c.straggler_window = Duration::from_micros(1_000_001)),
        ("straggler_window", |c| c.straggler_window = Duration::from_secs(u64::MAX)),
        ("batch_size", |c| c.batch_size = 0),
    ];
    let engine = full().load(|_| {});
    beside_a_neighbour(&engine, || {
        let error = |set: Set| {
            let mut config = config();
            set(&mut config);
            Engine::load(full().path, config).map(drop).expect_err("out of range")
        };
        for (wanted, set) in WHOLE {
            match error(set) {
                LoadError::Config(ConfigError::OutOfRange { name, value, min, max }) => {
                    assert!(name.starts_with(wanted) && !(min..=max).contains(&value), "{name} {value}");
                }
                other => panic!("{wanted}: {other:?}"),
            }
        }
        let quantized: Set = |c| {
            c.kv_type_v = KvType::Q8_0;
            c.flash_attention = FlashAttention::Off;
        };
        assert_eq!(error(quantized), LoadError::Config(ConfigError::QuantizedValuesWithoutFlashAttention));
    });
}
