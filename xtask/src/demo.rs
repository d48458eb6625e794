//! The demo, from a bare machine to four streaming completions.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use ::fixtures::manifest::{Manifest, TEST_MODEL_VARIABLE};

use crate::{Result, fixtures, setup, sh, test};

/// The model that the demo runs when no other is named.
const MODEL: &str = "smollm2-135m";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The GGUF to run [default: the one in `COTABBY_TEST_MODEL_PATH`, else SmolLM2-135M, which is fetched]
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// A prompt to complete, once for each completion [default: four of the demo's own]
    #[arg(long = "prompt", value_name = "TEXT")]
    prompts: Vec<String>,
    /// The most tokens of a completion [default: the demo's own]
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// Cargo features to build with, such as cuda, metal or vulkan
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    features: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result {
    setup::run(&setup::Args::default())?;
    let variable = env::var_os(TEST_MODEL_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    let model = match args.model.clone().or(variable) {
        Some(path) if path.is_file() => sh::absolute(&path),
        Some(path) => return Err(format!("there is no model at {}", path.display()).into()),
        None => fixtures::ensure(Manifest::load()?.model(MODEL)?)?,
    };
    // Built as a part of the whole workspace, because a package by itself resolves to other features of build
    // dependencies, and llama.cpp would be built a second time for it.
    let mut build = sh::cargo();
    build.args(["build", "--release", "--workspace", "--example", "demo"]);
    sh::run(build.arg("--features").arg(test::features(&args.features)))?;

    let program = sh::programs()?.join("examples").join(format!("demo{}", env::consts::EXE_SUFFIX));
    let mut demo = Command::new(program);
    demo.arg("--model").arg(model);
    demo.args(args.prompts.iter().flat_map(|prompt| ["--prompt", prompt.as_str()]));
    demo.args(args.max_tokens.iter().flat_map(|count| ["--max-tokens".to_owned(), count.to_string()]));
    sh::run(&mut demo)
}
