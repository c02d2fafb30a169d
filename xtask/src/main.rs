//! `cargo xtask <verb>`: build, test, demo and lab. A verb that only runs other programs has a file here. Every other
//! verb belongs to a program of its own, which is built when the verb is first used.

mod ci;
mod fuzz;
mod miri;
mod start;
mod test;

use clap::{Parser, Subcommand};
use shell::verbs;
use start::{DEMO, KERNELS, LAB, LOAD, MAKE, Words};
use std::ffi::OsString;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Build, test and try xdp-imds")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    #[command(about = verbs::BOOK, disable_help_flag = true)]
    Book(Words),
    #[command(about = verbs::BUILD_EBPF, disable_help_flag = true)]
    BuildEbpf(Words),
    /// Run every check that a change must pass: format, lints, docs, licences, the eBPF object, tests
    Ci(ci::Args),
    #[command(about = verbs::DEB, disable_help_flag = true)]
    Deb(Words),
    #[command(about = verbs::DEMO, disable_help_flag = true)]
    Demo(Words),
    #[command(about = verbs::DIST, disable_help_flag = true)]
    Dist(Words),
    /// Fuzz each target for some time, starting from the committed seeds
    Fuzz(fuzz::Args),
    #[command(about = verbs::GUEST, disable_help_flag = true)]
    Guest(Words),
    #[command(about = verbs::HAUL, disable_help_flag = true)]
    Haul(Words),
    #[command(about = verbs::IMAGE, disable_help_flag = true)]
    Image(Words),
    #[command(about = verbs::KERNELS, disable_help_flag = true)]
    Kernels(Words),
    #[command(about = verbs::LAB, disable_help_flag = true)]
    Lab(Words),
    #[command(about = verbs::LOAD, disable_help_flag = true)]
    Load(Words),
    #[command(about = verbs::MANIFESTS, disable_help_flag = true)]
    Manifests(Words),
    /// Run the unsafe code that needs no kernel under Miri
    Miri(miri::Args),
    #[command(about = verbs::RUN, disable_help_flag = true)]
    Run(Words),
    #[command(about = verbs::SCHEMAS, disable_help_flag = true)]
    Schemas(Words),
    #[command(about = verbs::SOAK, disable_help_flag = true)]
    Soak(Words),
    #[command(about = verbs::STORM, disable_help_flag = true)]
    Storm(Words),
    /// Build as this user, test as root, and count skipped tests
    Test(test::Args),
    #[command(about = verbs::TRAFFIC, disable_help_flag = true)]
    Traffic(Words),
    #[command(about = verbs::UNLOAD, disable_help_flag = true)]
    Unload(Words),
}

fn main() -> ExitCode {
    shell::exit_code(match Cli::parse_from(words(std::env::args_os())).verb {
        Verb::Book(words) => MAKE.start("book", &words),
        Verb::BuildEbpf(words) => MAKE.start("build-ebpf", &words),
        Verb::Ci(args) => ci::run(&args),
        Verb::Deb(words) => MAKE.start("deb", &words),
        Verb::Demo(words) => DEMO.start("demo", &words),
        Verb::Dist(words) => MAKE.start("dist", &words),
        Verb::Fuzz(args) => fuzz::run(&args),
        Verb::Guest(words) => LAB.start("guest", &words),
        Verb::Haul(words) => LAB.start("haul", &words),
        Verb::Image(words) => MAKE.start("image", &words),
        Verb::Kernels(words) => KERNELS.start("kernels", &words),
        Verb::Lab(words) => DEMO.start("lab", &words),
        Verb::Load(words) => LOAD.start("load", &words),
        Verb::Manifests(words) => MAKE.start("manifests", &words),
        Verb::Miri(args) => miri::run(&args),
        Verb::Run(words) => LOAD.start("run", &words),
        Verb::Schemas(words) => MAKE.start("schemas", &words),
        Verb::Soak(words) => LAB.start("soak", &words),
        Verb::Storm(words) => LAB.start("storm", &words),
        Verb::Test(args) => test::run(&args),
        Verb::Traffic(words) => LAB.start("traffic", &words),
        Verb::Unload(words) => LOAD.start("unload", &words),
    })
}

/// Returns the command line with `help VERB` turned into `VERB --help`, which has one meaning for every verb.
fn words(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<_> = words.collect();
    if words.len() == 3 && words[1] == "help" {
        words.remove(1);
        words.push("--help".into());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::{Cli, Verb, words};
    use clap::{CommandFactory as _, Parser as _};

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_of_started_verbs_reach_their_programs() {
        for given in [
            "storm",
            "storm --help",
            "storm -h",
            "storm --vms 100,600 --json -",
            "storm --version",
            "storm help",
            "storm --agent=x -- --help",
        ] {
            let line = format!("xtask {given}");
            let parsed =
                Cli::try_parse_from(line.split(' ')).unwrap_or_else(|error| panic!("{given}: {error}"));
            let Verb::Storm(passed) = parsed.verb else { panic!("{given} is another verb") };
            let expected: Vec<_> = given.split(' ').skip(1).collect();
            assert_eq!(passed.words, expected, "{given}");
        }
    }

    #[test]
    fn help_of_a_verb_becomes_the_verb_with_help() {
        let line = |text: &str| words(text.split(' ').map(Into::into));
        assert_eq!(line("xtask help storm"), ["xtask", "storm", "--help"]);
        assert_eq!(line("xtask help"), ["xtask", "help"]);
        assert_eq!(line("xtask lab shell help"), ["xtask", "lab", "shell", "help"]);
    }
}
