//! The verbs of `cargo xtask` that show xdp-imds. They build quickly, because they compile no part of the agent.

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
    /// Run a demo: guests on real taps ask the real agent and get their own metadata
    Demo(demo::Args),
    /// Keep a lab up: a node and guests to work with by hand
    Lab(lab::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().verb {
        Verb::Demo(args) => demo::run(&args),
        Verb::Lab(args) => lab::run(args),
    }
}
