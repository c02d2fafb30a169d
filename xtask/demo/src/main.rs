//! The verbs of `cargo xtask` that show xdp-imds: nothing of the agent is compiled into them, so they are built soon.

mod demo;
mod lab;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Show it: guests on true taps ask the real agent and get their own metadata
    Demo(demo::Args),
    /// A lab that stays: a node and guests to work with by hand
    Lab(lab::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().verb {
        Verb::Demo(args) => demo::run(&args),
        Verb::Lab(args) => lab::run(args),
    }
}
