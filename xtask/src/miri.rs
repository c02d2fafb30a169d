//! `cargo xtask miri`: runs the unsafe code that needs no kernel under Miri.
//!
//! This covers AF_XDP's rings, the frame memory and the table shared with the kernel, over plain memory. Miri finds
//! accesses out of bounds, reads of uninitialised memory, uses of dangling pointers, and data races.

use crate::fuzz;
use anyhow::{Result, bail};
use std::process::{Command, Stdio};

/// The tests to run: the module that has the unsafe code.
const MODULE: &str = "afxdp::";
/// Isolation is off because randomised tests read their seed from the environment.
const FLAGS: &str = "-Zmiri-disable-isolation";

/// Which tests to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Further arguments for the test program, for example a test's name
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(missing) = missing() {
        bail!("{missing}");
    }
    let mut command = miri();
    command.args(["test", "--package", "metadata-datapath", "--lib", "--", MODULE]).args(&args.words);
    let seed = std::env::var_os("XDP_IMDS_SEED").unwrap_or_else(|| "1".into());
    shell::run(command.env("MIRIFLAGS", FLAGS).env("XDP_IMDS_SEED", seed))
}

/// Says what Miri needs and this machine lacks.
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
    // These variables would make the nightly Cargo use this one's toolchain.
    command.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").env_remove("RUSTC").current_dir(shell::top());
    command.args(["+nightly", "miri"]);
    command
}
