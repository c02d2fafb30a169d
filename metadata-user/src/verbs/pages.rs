//! `xdp-imds pages`: writes manual pages and completions of shells, which packages ship.

use anyhow::{Context as _, Result};
use clap::{Arg, ArgAction, Command};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};
use std::fs;
use std::path::{Path, PathBuf};

/// The shells, each with the name of its directory.
const SHELLS: [(Shell, &str); 3] = [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")];

/// The files of the service, as the packages install them.
const FILES: [(&str, &str); 6] = [
    ("/etc/xdp-imds/config.yaml", "The configuration of the agent."),
    ("/etc/xdp-imds/records.d", "Records of VMs, a file for each."),
    ("/etc/xdp-imds/libvirt", "Parts of the records of libvirt's domains."),
    ("/var/lib/xdp-imds", "What outlives the agent: registrations, token keys, what guests wrote."),
    ("/run/xdp-imds", "The sockets of the agent."),
    (
        "/usr/share/doc/xdp-imds",
        "The pages of the book: how to operate it, and every field of records and configuration.",
    ),
];

/// Writes below `dir` a manual page of the command and of each verb that its help lists (`man1`), and one file of
/// completions for each shell (`bash`, `zsh`, `fish`). The content depends on nothing but the command.
///
/// # Errors
///
/// If a directory or file cannot be written.
pub fn write(command: Command, dir: &Path) -> Result<()> {
    let name = command.get_name().to_owned();
    let place = made(dir, "man1")?;
    let mut shown = visible(&command).disable_help_subcommand(true);
    shown.build();
    write_pages(&shown, &place)
        .with_context(|| format!("cannot write manual pages in {}", place.display()))?;
    let mut completed = visible(&command);
    for (shell, place) in SHELLS {
        let place = made(dir, place)?;
        let written = clap_complete::generate_to(shell, &mut completed, &name, &place);
        let written =
            written.and_then(|file| if shell == Shell::Bash { drop_placeholders(&file) } else { Ok(()) });
        written.with_context(|| format!("cannot write completions in {}", place.display()))?;
    }
    Ok(())
}

/// Makes a directory below `dir`.
fn made(dir: &Path, name: &str) -> Result<PathBuf> {
    let place = dir.join(name);
    fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    Ok(place)
}

/// The command without its hidden verbs, which completions would list.
fn visible(command: &Command) -> Command {
    let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set()).map(visible);
    let verbs: Vec<_> = verbs.collect();
    let all = command.clone();
    let mut shown = Command::new(kept(command.get_name()))
        // A page has no short form that leaves out an option.
        .args(
            all.get_arguments()
                .filter(|argument| !argument.is_hide_set())
                .map(|argument| argument.clone().hide_short_help(false)),
        )
        .groups(all.get_groups().cloned())
        .subcommand_required(command.is_subcommand_required_set())
        .subcommand_value_name("VERB")
        .subcommand_help_heading("VERBS")
        .subcommands(verbs);
    if let Some(about) = command.get_about() {
        shown = shown.about(about.clone());
    }
    if let Some(about) = command.get_long_about() {
        shown = shown.long_about(about.clone());
    }
    if let Some(help) = command.get_after_long_help() {
        shown = shown.after_long_help(help.clone());
    }
    match command.get_version() {
        Some(version) => shown.version(kept(version)),
        None => shown,
    }
}

/// A name for clap, which takes those that live as long as the program. It ends once the pages are written.
fn kept(name: &str) -> &'static str {
    name.to_owned().leak()
}

/// Takes the placeholders of positional arguments, such as `<RECORDS>`, out of bash's lists of words: nobody types them.
fn drop_placeholders(file: &Path) -> std::io::Result<()> {
    let text = fs::read_to_string(file)?;
    let kept = text.lines().map(|line| {
        let Some((before, words)) = line.split_once("opts=\"") else { return line.to_owned() };
        let words = words.trim_end_matches('"').split(' ');
        let words: Vec<_> = words.filter(|word| !word.starts_with(['<', '['])).collect();
        format!("{before}opts=\"{}\"", words.join(" "))
    });
    fs::write(file, kept.map(|line| line + "\n").collect::<String>())
}

fn write_pages(command: &Command, place: &Path) -> std::io::Result<()> {
    for verb in command.get_subcommands() {
        write_pages(verb, place)?;
    }
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let mut page = Vec::new();
    write_page(command, &mut page)?;
    fs::write(place.join(format!("{name}.1")), page)
}

fn write_page(command: &Command, page: &mut Vec<u8>) -> std::io::Result<()> {
    let shown = command.clone().override_usage(synopsis(command));
    let man = Man::new(shown).source("xdp-imds").manual("xdp-imds");
    man.render_title(page)?;
    name(command).to_writer(page)?;
    man.render_synopsis_section(page)?;
    man.render_description_section(page)?;
    if command.get_arguments().next().is_some() {
        man.render_options_section(page)?;
    }
    if command.has_subcommands() {
        man.render_subcommands_section(page)?;
    }
    more(command).to_writer(page)?;
    if command.get_version().is_some() {
        man.render_version_section(page)?;
    }
    Ok(())
}

/// The section NAME: one line, from which `apropos` takes its index.
fn name(command: &Command) -> Roff {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let about = about.trim_end_matches('.');
    let mut first = about.chars();
    let about =
        first.next().map(|c| format!("{}{}", c.to_ascii_lowercase(), first.as_str())).unwrap_or_default();
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let mut roff = Roff::new();
    roff.control("SH", ["NAME"]).text([roman(format!("{name} - {about}"))]);
    roff
}

/// The command with all its options and arguments, as it is typed.
fn synopsis(command: &Command) -> String {
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    let options = command.get_arguments().filter(|argument| !argument.is_positional() && !is_help(argument));
    let (global, own): (Vec<_>, Vec<_>) = options.partition(|argument| argument.is_global_set());
    let options = own.into_iter().chain(global).map(|argument| bracketed(argument, option(argument)));
    let positional = command.get_positionals().map(|argument| bracketed(argument, value(argument)));
    let verb = command.has_subcommands().then(|| "VERB …".to_owned());
    let words = options.chain(positional).chain(verb);
    std::iter::once(name.to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

fn is_help(argument: &Arg) -> bool {
    matches!(
        argument.get_action(),
        ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
    )
}

fn option(argument: &Arg) -> String {
    let short = argument.get_short().map(|short| format!("-{short}"));
    let name = argument.get_long().map(|long| format!("--{long}")).or(short).unwrap_or_default();
    match argument.get_action() {
        ArgAction::Set | ArgAction::Append => format!("{name} {}", value(argument)),
        _ => name,
    }
}

fn value(argument: &Arg) -> String {
    let names = argument.get_value_names().unwrap_or_default();
    names.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// With brackets if it may be left out, and dots if it may be repeated.
fn bracketed(argument: &Arg, text: String) -> String {
    let text = if argument.is_required_set() { text } else { format!("[{text}]") };
    let repeats = matches!(argument.get_action(), ArgAction::Append)
        || argument.get_num_args().is_some_and(|range| range.max_values() > 1);
    if repeats { format!("{text}…") } else { text }
}

/// The verb as an operator types it, such as `ls` or `event ls`; the argument of [`super::exit_codes`].
fn verb(command: &Command) -> String {
    let whole = command.get_bin_name().unwrap_or_else(|| command.get_name());
    whole.split_once(' ').map_or(whole, |(_, verb)| verb).to_owned()
}

/// The sections after the options.
fn more(command: &Command) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["EXIT STATUS"]);
    for (code, meaning) in super::exit_codes(&verb(command)) {
        roff.control("TP", []).text([bold(code.to_string())]).text([roman(format!("{meaning}."))]);
    }
    if let Some(help) = command.get_after_long_help().map(ToString::to_string) {
        let (heading, help) = match help.strip_prefix("Examples:\n") {
            Some(examples) => ("EXAMPLES", examples.to_owned()),
            None => ("NOTES", help),
        };
        roff.control("SH", [heading]).control("nf", []);
        for line in help.lines() {
            roff.text([if line.is_empty() { Inline::LineBreak } else { roman(line) }]);
        }
        roff.control("fi", []);
    }
    if command.get_name() == "xdp-imds" {
        roff.control("SH", ["FILES"]);
        for (file, holds) in FILES {
            roff.control("TP", []).text([bold(file)]).text([roman(holds)]);
        }
    } else {
        let pages = format!("(1), and the pages in {}", FILES[FILES.len() - 1].0);
        roff.control("SH", ["SEE ALSO"]).text([bold("xdp-imds"), roman(pages)]);
    }
    roff
}

#[cfg(test)]
mod tests {
    use super::{drop_placeholders, more, synopsis, visible};
    use clap::{Arg, ArgAction, Command};

    fn command() -> Command {
        let check = Command::new("check")
            .about("Check.")
            .arg(Arg::new("dir").value_name("DIR").required(true))
            .arg(Arg::new("config").long("config").value_name("FILE"))
            .arg(Arg::new("paths").long("paths").action(ArgAction::SetTrue))
            .arg(Arg::new("more").short('H').value_name("FIELD").action(ArgAction::Append));
        Command::new("x").subcommand(check).subcommand(Command::new("secret").hide(true))
    }

    #[test]
    fn a_synopsis_has_each_option_with_its_value() {
        let mut shown = visible(&command()).disable_help_subcommand(true);
        shown.build();
        let check = shown.find_subcommand("check").expect("a verb");
        assert_eq!(synopsis(check), "x check [--config FILE] [--paths] [-H FIELD]… DIR");
        assert_eq!(shown.get_subcommands().map(Command::get_name).collect::<Vec<_>>(), ["check"]);
    }

    #[test]
    fn the_page_of_the_command_lists_its_files_and_the_others_lead_to_the_book() {
        let page = |name: &'static str| more(&Command::new(name)).to_roff();
        let (own, verb) = (page("xdp-imds"), page("check"));
        for file in ["/etc/xdp\\-imds/config.yaml", "/usr/share/doc/xdp\\-imds"] {
            assert!(own.contains(file), "{own}");
        }
        assert!(own.contains("FILES") && !own.contains("SEE ALSO"), "{own}");
        assert!(verb.contains("SEE ALSO") && verb.contains("/usr/share/doc/xdp\\-imds"), "{verb}");
    }

    #[test]
    fn placeholders_are_no_completions() {
        let room = tempfile::tempdir().expect("a directory");
        let file = room.path().join("x.bash");
        std::fs::write(&file, "  opts=\"-h --config <DIR> [FILE]... yes\"\n  other <DIR>\n")
            .expect("written");
        drop_placeholders(&file).expect("written");
        let text = std::fs::read_to_string(&file).expect("text");
        assert_eq!(text, "  opts=\"-h --config yes\"\n  other <DIR>\n");
    }
}
