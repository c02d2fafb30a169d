//! The verbs of `cargo xtask` that show xdp-imds. They build quickly, because they compile no part of the agent.

mod demo;
mod lab;

use clap::{Parser, Subcommand};
use shell::verbs;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    #[command(about = verbs::DEMO)]
    Demo(demo::Args),
    #[command(about = verbs::LAB)]
    Lab(lab::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().verb {
        Verb::Demo(args) => demo::run(&args),
        Verb::Lab(args) => lab::run(args),
    }
}
