//! `xdp-imds top`: the live view of a node in a terminal.
//!
//! The agent follows its guests while it is asked, and makes the documents; [`metadata_control::screen`] draws them.

use metadata_common::time;
use metadata_control::screen::terminal::EndConditions;
use metadata_control::screen::{
    Documents, Screen, ScreenContent, TerminalStyle, ViewQuery, fetch, printed, terminal,
};
use metadata_control::status;
use metadata_control::top::{LISTED_MOST, TopQuery, VmOrder};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{Exit, ExitError, options};
use crate::output;

/// Least and most time between two requests. The agent stops following guests if it is not asked for longer.
const INTERVAL: std::ops::RangeInclusive<Duration> = Duration::from_millis(200)..=Duration::from_secs(20);
/// How long `--once` watches before it shows: rates need two readings, which are a second apart.
const ONCE: Duration = Duration::from_millis(1_200);

/// The options of the verb.
#[derive(clap::Args, Clone, Debug)]
pub struct TopArgs {
    /// Show the page of this VM first, with its last requests.
    #[arg(value_name = options::GUEST)]
    guest: Option<String>,
    #[command(flatten)]
    agent: options::Agent,
    /// Print one screen as text, and exit.
    ///
    /// This is also what happens if standard output is not a terminal.
    #[arg(long)]
    once: bool,
    /// Print one document as JSON, and exit.
    #[arg(long, conflicts_with = "once")]
    json: bool,
    /// Time between two requests to the agent, 200ms to 20s.
    ///
    /// Seconds (`2`), or a number with a unit (`2s`, `500ms`). Choose more for a slow link.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// The order of VMs.
    #[arg(long, value_name = "ORDER", default_value = "newest",
          value_parser = clap::builder::PossibleValuesParser::new(VmOrder::ALL.map(VmOrder::name)))]
    sort: String,
    /// Show only VMs with this text in their name, UUID, port, MAC, dialect or stage.
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Number of VMs to list, at most 512 [default: as many as a screen needs].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=LISTED_MOST as i64))]
    limit: Option<u16>,
}

fn interval(text: &str) -> Result<Duration, String> {
    time::span_within(text, INTERVAL)
}

impl TopArgs {
    fn query(&self) -> TopQuery {
        TopQuery {
            limit: self.limit.map(Into::into),
            sort: VmOrder::ALL.into_iter().find(|sort| sort.name() == self.sort).unwrap_or_default(),
            filter: self.filter.clone(),
            ..TopQuery::default()
        }
    }

    fn screen(&self) -> Screen {
        let shown = self.guest.clone().map_or(ScreenContent::Node, ScreenContent::Vm);
        Screen { shown, ..Screen::new(self.query()) }
    }
}

/// Shows the view until the user ends it, or prints it once.
///
/// # Errors
/// The configuration cannot be read, the terminal cannot be used, the agent knows no guest of the name, or, for
/// `--once` and `--json`, no agent answers.
pub fn run(arguments: &TopArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let run = arguments.agent.run()?;
    if arguments.json {
        return print_json(arguments, &run, out);
    }
    let look = TerminalStyle::of(|name| std::env::var(name).ok());
    if arguments.once || !output::is_terminal() {
        return print_once(arguments, &run, look, out);
    }
    // An agent that does not answer may come back, but a name that it does not know is mistyped.
    if arguments.guest.is_some()
        && let Ok(documents) = fetch(&run, &arguments.screen().asked())
    {
        known(&documents)?;
    }
    let ask = move |asked: &ViewQuery| fetch(&run, asked).map_err(|error| error.to_string());
    if !terminal::can_draw() {
        return print_often(arguments, look, ask, out);
    }
    terminal::exit_on_hang_up()?;
    Ok(terminal::run(arguments.screen(), look, arguments.interval, Box::new(ask), EndConditions::default())?)
}

/// Prints the document that the agent makes: a list of pages if the arguments name a VM.
fn print_json(arguments: &TopArgs, run: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    let query = TopQuery { guest: arguments.guest.clone(), ..arguments.query() };
    status::get(run, &query.path())?;
    std::thread::sleep(ONCE);
    let answer = status::get(run, &query.path())?;
    out.write_all(&answer)?;
    writeln!(out)?;
    match &query.guest {
        // The list of its pages is empty.
        Some(name) if answer.trim_ascii() == b"[]" => Err(unknown(name)),
        _ => Ok(()),
    }
}

/// Fails if a guest was asked for and none has its name.
fn known(documents: &Documents) -> anyhow::Result<()> {
    match &documents.vm {
        Some((name, pages)) if pages.is_empty() => Err(unknown(name)),
        _ => Ok(()),
    }
}

fn unknown(name: &str) -> anyhow::Error {
    let text = format!(
        "no guest is known as {name}: expected a port, a MAC, a VM's name or UUID, or a record; `xdp-imds ls` lists all"
    );
    ExitError::new(Exit::Unknown, text).into()
}

fn print_once(
    arguments: &TopArgs,
    run: &Path,
    look: TerminalStyle,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut screen = arguments.screen();
    known(&fetch(run, &screen.asked())?)?;
    std::thread::sleep(ONCE);
    screen.on_answer(Ok(fetch(run, &screen.asked())?));
    Ok(out.write_all(printed(&screen, terminal::size(), look).as_bytes())?)
}

/// Prints a screen after each interval, for a terminal that cannot move its cursor. Ends when output fails.
fn print_often(
    arguments: &TopArgs,
    look: TerminalStyle,
    ask: impl Fn(&ViewQuery) -> Result<Documents, String>,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut screen = arguments.screen();
    loop {
        let begun = Instant::now();
        screen.on_answer(ask(&screen.asked()));
        writeln!(out, "{}", printed(&screen, terminal::size(), look))?;
        out.flush()?;
        std::thread::sleep(arguments.interval.saturating_sub(begun.elapsed()));
    }
}

#[cfg(test)]
mod tests {
    use super::interval;
    use std::time::Duration;

    #[test]
    fn an_interval_has_limits() {
        for (text, expected) in [
            ("1", Some(1_000)),
            ("0.2", Some(200)),
            ("20", Some(20_000)),
            ("2s", Some(2_000)),
            ("500ms", Some(500)),
        ] {
            assert_eq!(interval(text).ok(), expected.map(Duration::from_millis), "{text}");
        }
        for text in ["", "0", "0.1", "21", "-1", "nan", "inf", "fast"] {
            assert!(interval(text).is_err(), "{text}");
        }
    }
}
