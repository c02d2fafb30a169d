//! `cargo xtask kernels`: boots kernels in QEMU, amd64 and arm64, and runs chosen tests inside each.
//!
//! ```text
//!  kernel (Debian's package, or a file) ─┐
//!  its modules                          ─┤
//!  a small root of Debian's packages    ─┼─► initramfs ─► QEMU, two processors ─► console ─► table, JSON
//!  the agent and the test programs      ─┤
//!  init.sh, and the list of checks      ─┘
//! ```
//!
//! A guest has no network device and no disk. All traffic stays in namespaces that the tests make in the guest.

mod checks;
mod initramfs;
mod kernel;
mod report;
mod run;

use clap::{Parser, Subcommand};
use shell::verbs;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    #[command(about = verbs::KERNELS)]
    Kernels(run::Args),
}

fn main() -> ExitCode {
    shell::exit_code(match Cli::parse().verb {
        Verb::Kernels(args) => run::run(&args),
    })
}
