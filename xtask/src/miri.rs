//! `cargo xtask miri`: the unsafe code that can run without a kernel, under Miri.
//!
//! That is all of AF_XDP's rings, frame memory and the table shared with the kernel, over plain memory: Miri sees
//! every access out of bounds, to what is not initialised, through a pointer that may not be used any more, and
//! every race.

use crate::fuzz;
use anyhow::{Result, bail};
use std::process::{Command, Stdio};

/// The tests.
const ROOM: &str = "afxdp::";
/// Random tests take their seed from the environment; small sizes are the tests' own affair.
const FLAGS: &str = "-Zmiri-disable-isolation";

/// What to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Further words for the test program, e.g. a test's name
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(missing) = missing() {
        bail!("{missing}");
    }
    let mut command = miri();
    command.args(["test", "--package", "metadata-datapath", "--lib", "--", ROOM]).args(&args.words);
    let seed = std::env::var_os("XDP_IMDS_SEED").unwrap_or_else(|| "1".into());
    shell::run(command.env("MIRIFLAGS", FLAGS).env("XDP_IMDS_SEED", seed))
}

/// What is missing to run at all.
pub(crate) fn missing() -> Option<&'static str> {
    let works = fuzz::has_nightly()
        && miri()
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
    let advice =
        "Miri is missing; run `rustup toolchain install nightly --component miri --component rust-src`";
    (!works).then_some(advice)
}

fn miri() -> Command {
    let mut command = Command::new("cargo");
    // Not the variables that bind this program's own Cargo to its toolchain.
    command.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").env_remove("RUSTC").current_dir(shell::top());
    command.args(["+nightly", "miri"]);
    command
}
