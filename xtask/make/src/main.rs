//! The verbs of `cargo xtask` that make or check committed or released files.

mod book;
mod build_ebpf;
mod deb;
mod dist;
mod image;
mod manifests;
mod schemas;

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
    #[command(about = verbs::BOOK)]
    Book(book::Args),
    #[command(about = verbs::BUILD_EBPF)]
    BuildEbpf(build_ebpf::Args),
    #[command(about = verbs::DEB)]
    Deb(deb::Args),
    #[command(about = verbs::DIST)]
    Dist(dist::Args),
    #[command(about = verbs::IMAGE)]
    Image(image::Args),
    #[command(about = verbs::MANIFESTS)]
    Manifests(manifests::Args),
    #[command(about = verbs::SCHEMAS)]
    Schemas(schemas::Args),
}

fn main() -> ExitCode {
    shell::exit_code(match Cli::parse().verb {
        Verb::Book(args) => book::run(&args),
        Verb::BuildEbpf(args) => build_ebpf::run(&args),
        Verb::Deb(args) => deb::run(&args),
        Verb::Dist(args) => dist::run(&args),
        Verb::Image(args) => image::run(&args),
        Verb::Manifests(args) => manifests::run(&args),
        Verb::Schemas(args) => schemas::run(&args),
    })
}
