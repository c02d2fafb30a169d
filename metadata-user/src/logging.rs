//! The log of this process on standard error: which lines it has, and in which format; and its last warnings, which
//! `xdp-imds status` shows.

use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::io;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::service::audit::write_json;
use clap::ValueEnum;
use metadata_common::printable::Printable;
use metadata_control::status::RecentWarning;
use serde::{Deserialize, Serialize};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::{self, Format, FormatEvent, FormatFields, Full, Writer};
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{self as lines, FmtContext};
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Layer, Registry, reload};

/// The environment variable of the filter.
pub const FILTER_VARIABLE: &str = "XDP_IMDS_LOG";
/// The environment variable of the format.
pub const FORMAT_VARIABLE: &str = "XDP_IMDS_LOG_FORMAT";
/// The environment variable by which systemd names the journal's socket (systemd.exec(5)).
pub const JOURNAL_VARIABLE: &str = "JOURNAL_STREAM";

/// The crate of the Kubernetes client. It logs each failed request as an error without naming the request; the feed
/// logs what failed. A filter that names the crate enables its lines.
const NOISE: &str = "kube_client";

/// The crates that log: this program's, then those of others. A filter that names another one would do nothing.
const CRATES: [&str; 13] = [
    "metadata_datapath",
    "metadata_feed",
    "metadata_links",
    "metadata_signer",
    "metadata_steer",
    "metadata_user",
    "xdp_imds",
    "h2",
    "hadris_iso",
    "hyper_util",
    NOISE,
    "tower",
    "tower_http",
];

/// Names of the levels, from no line to most lines.
const LEVELS: [(&str, LevelFilter); 6] = [
    ("off", LevelFilter::OFF),
    ("error", LevelFilter::ERROR),
    ("warn", LevelFilter::WARN),
    ("info", LevelFilter::INFO),
    ("debug", LevelFilter::DEBUG),
    ("trace", LevelFilter::TRACE),
];

/// Which lines the log has: a level, and levels of parts of the program that differ from it.
///
/// ```text
/// warn                             # errors and warnings
/// info,metadata_steer=debug        # and everything but the finest detail of one crate
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LogFilter(Targets);

impl Default for LogFilter {
    fn default() -> Self {
        Self(Targets::new().with_target(NOISE, LevelFilter::OFF).with_default(LevelFilter::INFO))
    }
}

impl FromStr for LogFilter {
    type Err = String;

    /// Parses `LEVEL`, or levels and `PART=LEVEL`, separated by commas. Without a level of its own, everything else is
    /// logged at `info`: a filter that names one part does not switch off the others.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Self(mut targets) = Self::default();
        let mut has_default = false;
        for word in text.split(',').map(str::trim) {
            match word.split_once('=') {
                Some((part, level)) => {
                    targets = targets.with_target(parse_part(part)?, parse_level(level)?);
                }
                None => {
                    let level = parse_level(word)?;
                    if has_default {
                        return Err(format!("a second level `{word}`; write PART=LEVEL for one part"));
                    }
                    targets = targets.with_default(level);
                    has_default = true;
                }
            }
        }
        Ok(Self(targets))
    }
}

fn parse_level(word: &str) -> Result<LevelFilter, String> {
    let word = word.trim();
    // The word of syslog, Python and Go.
    let name = if word.eq_ignore_ascii_case("warning") { "warn" } else { word };
    let level = LEVELS.iter().find(|(level, _)| name.eq_ignore_ascii_case(level));
    level.map(|(_, level)| *level).ok_or_else(|| {
        let names = LEVELS.map(|(name, _)| name).join(", ");
        format!("unknown level `{word}`; the levels are {names}, and `PART=LEVEL` sets that of one part")
    })
}

/// A crate that logs, or a module of one: a path of Rust.
fn parse_part(word: &str) -> Result<&str, String> {
    let word = word.trim();
    let is_known = CRATES.contains(&word.split("::").next().unwrap_or_default())
        && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':'));
    is_known.then_some(word).ok_or_else(|| {
        let crates = CRATES.join(", ");
        format!(
            "unknown part `{word}`; the parts are these crates, and their modules (`CRATE::MODULE`): {crates}"
        )
    })
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// `journal` if standard error is systemd's journal, else `text`.
    #[default]
    Auto,
    /// Time, level, message and fields.
    Text,
    /// Like `text`, with a syslog priority for the journal, and without a time, which the journal adds.
    Journal,
    /// A JSON object for each line, with `timestamp`, `level`, `target`, `message` and `fields`.
    Json,
}

impl LogFormat {
    /// Returns the word for it in the configuration and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Text => "text",
            Self::Journal => "journal",
            Self::Json => "json",
        }
    }
}

/// True if systemd connected standard error to its journal.
fn is_journal() -> bool {
    let Ok(stream) = std::env::var(JOURNAL_VARIABLE) else { return false };
    // The variable is inherited, and standard error may be another file by now.
    rustix::fs::fstat(io::stderr()).is_ok_and(|file| stream == format!("{}:{}", file.st_dev, file.st_ino))
}

/// The filter, as text, and the format in force.
static IN_FORCE: Mutex<Option<(String, LogFormat)>> = Mutex::new(None);

/// The environment by which another process of this program logs like this one.
#[must_use]
pub fn environment() -> Vec<(&'static str, String)> {
    let in_force = IN_FORCE.lock().unwrap_or_else(PoisonError::into_inner).clone();
    in_force.map_or_else(Vec::new, |(filter, format)| {
        vec![(FILTER_VARIABLE, filter), (FORMAT_VARIABLE, format.name().to_owned())]
    })
}

/// The prefix of an error that ends the command, on standard error: the journal's priority of an error, if standard
/// error is the journal.
#[must_use]
pub fn error_prefix() -> String {
    if is_journal() { format!("<{}>", priority(Level::ERROR)) } else { String::new() }
}

/// The priority of syslog (RFC 5424 section 6.2.1) for a level.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Changes the filter and the format of this process's log.
pub struct LogHandle {
    /// The filter of the command line or the environment, which overrides that of the configuration.
    asked: Option<String>,
    /// The format of the command line or the environment, which overrides that of the configuration.
    asked_format: Option<LogFormat>,
    filter: reload::Handle<Targets, Registry>,
    format: Arc<Mutex<LogFormat>>,
}

impl LogHandle {
    /// Starts the log of this process. `asked` is a filter that [`LogFilter`] accepts.
    #[must_use]
    pub fn start(asked: Option<String>, asked_format: Option<LogFormat>, ansi: bool) -> Self {
        let (layer, filter) = reload::Layer::new(LogFilter::default().0);
        // Messages and fields repeat what others wrote: names, paths, errors of servers.
        let fields = format::debug_fn(|out, field, value| match field.name() {
            "message" => write!(out, "{}", Printable(format_args!("{value:?}"))),
            name => write!(out, "{name}={}", Printable(format_args!("{value:?}"))),
        });
        let format = Arc::default();
        let lines = lines::layer()
            .fmt_fields(fields.delimited(" "))
            .event_format(LineFormat {
                form: Arc::clone(&format),
                text: Format::default().with_target(false),
            })
            .with_writer(io::stderr)
            .with_ansi(ansi);
        tracing_subscriber::registry()
            .with(lines.with_filter(layer))
            .with(Recent.with_filter(
                Targets::new().with_default(LevelFilter::WARN).with_target(NOISE, LevelFilter::OFF),
            ))
            .init();
        let log = Self { asked, asked_format, filter, format };
        log.follow(None, LogFormat::Auto);
        log
    }

    /// Applies the filter and the format of a validated configuration.
    pub fn follow(&self, configured: Option<&str>, format: LogFormat) {
        let text = self.asked.as_deref().or(configured).unwrap_or("info");
        // Both were checked when they were read.
        let set = text
            .parse::<LogFilter>()
            .and_then(|LogFilter(targets)| self.filter.reload(targets).map_err(|error| error.to_string()));
        if let Err(error) = set {
            tracing::warn!("the log filter stays unchanged: {error}");
        }
        let format = match self.asked_format.unwrap_or(format) {
            LogFormat::Auto if is_journal() => LogFormat::Journal,
            LogFormat::Auto => LogFormat::Text,
            format => format,
        };
        *self.format.lock().unwrap_or_else(PoisonError::into_inner) = format;
        *IN_FORCE.lock().unwrap_or_else(PoisonError::into_inner) = Some((text.to_owned(), format));
    }
}

/// Writes an event in the format in force.
struct LineFormat {
    form: Arc<Mutex<LogFormat>>,
    text: Format<Full, SystemTime>,
}

impl<S, N> FormatEvent<S, N> for LineFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let form = *self.form.lock().unwrap_or_else(PoisonError::into_inner);
        match form {
            LogFormat::Auto | LogFormat::Text => self.text.format_event(context, out, event),
            LogFormat::Journal => {
                let level = *event.metadata().level();
                write!(out, "<{}>{level} ", priority(level))?;
                context.format_fields(out.by_ref(), event)?;
                writeln!(out)
            }
            LogFormat::Json => writeln!(out, "{}", json_line(event)?),
        }
    }
}

#[derive(Serialize)]
struct JsonLine<'a> {
    timestamp: String,
    level: String,
    target: &'a str,
    message: String,
    #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
    fields: serde_json::Map<String, serde_json::Value>,
}

fn json_line(event: &Event<'_>) -> Result<String, fmt::Error> {
    let metadata = event.metadata();
    let mut timestamp = String::new();
    SystemTime.format_time(&mut Writer::new(&mut timestamp))?;
    let mut line = JsonLine {
        timestamp,
        level: metadata.level().as_str().to_ascii_lowercase(),
        target: metadata.target(),
        message: String::new(),
        fields: serde_json::Map::new(),
    };
    event.record(&mut line);
    let mut text = Vec::new();
    write_json(&mut text, &line).map_err(|_| fmt::Error)?;
    String::from_utf8(text).map_err(|_| fmt::Error)
}

impl JsonLine<'_> {
    fn add(&mut self, field: &Field, value: impl Into<serde_json::Value>) {
        self.fields.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for JsonLine<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            _ => self.add(field, format!("{value:?}")),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message = value.to_owned(),
            _ => self.add(field, value),
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value);
    }
}

// The last warnings, which `xdp-imds status` shows.

/// Maximum number of warnings kept.
pub const KEPT: usize = 16;
/// Maximum length of one warning, in bytes; the rest is cut off.
pub const TEXT_MAX: usize = 512;

static LAST: Mutex<VecDeque<Warning>> = Mutex::new(VecDeque::new());

struct Warning {
    level: Level,
    text: String,
    at: Instant,
    times: u64,
}

/// Keeps the last [`KEPT`] warnings and errors of the process. Consecutive repeats are one entry with a count.
#[derive(Clone, Copy, Debug, Default)]
pub struct Recent;

impl<S: Subscriber> Layer<S> for Recent {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let level = *event.metadata().level();
        if level > Level::WARN {
            return;
        }
        let mut text = Text::default();
        event.record(&mut text);
        keep(&mut LAST.lock().unwrap_or_else(PoisonError::into_inner), level, text.0);
    }
}

fn keep(last: &mut VecDeque<Warning>, level: Level, text: String) {
    let at = Instant::now();
    match last.back_mut().filter(|warning| warning.level == level && warning.text == text) {
        Some(same) => (same.at, same.times) = (at, same.times + 1),
        None => {
            if last.len() == KEPT {
                last.pop_front();
            }
            last.push_back(Warning { level, text, at, times: 1 });
        }
    }
}

/// Returns the kept warnings, oldest first.
#[must_use]
pub fn recent_warnings() -> Vec<RecentWarning> {
    let last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    let said = |warning: &Warning| RecentWarning {
        level: warning.level.as_str().to_ascii_lowercase(),
        ago: warning.at.elapsed().as_secs_f64(),
        times: warning.times,
        text: warning.text.clone(),
    };
    last.iter().map(said).collect()
}

/// The message and fields of an event, at most [`TEXT_MAX`] bytes.
#[derive(Default)]
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let space = if self.0.is_empty() { "" } else { " " };
        let written = match field.name() {
            "message" => write!(self.0, "{space}{value:?}"),
            name => write!(self.0, "{space}{name}={value:?}"),
        };
        debug_assert!(written.is_ok(), "writing to a String does not fail");
        if self.0.len() > TEXT_MAX {
            self.0.truncate(self.0.floor_char_boundary(TEXT_MAX - '…'.len_utf8()));
            self.0.push('…');
        }
    }
}

/// Collects what is logged.
#[cfg(test)]
#[derive(Clone, Default)]
pub(crate) struct LogCollector(Arc<Mutex<Vec<u8>>>);

#[cfg(test)]
impl LogCollector {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().expect("no panic").clone()).expect("text")
    }
}

#[cfg(test)]
impl io::Write for LogCollector {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{
        CRATES, KEPT, LineFormat, LogCollector, LogFilter, LogFormat, Recent, TEXT_MAX, keep, recent_warnings,
    };
    use std::collections::{BTreeSet, VecDeque};
    use std::sync::{Arc, Mutex};
    use tracing::Level;
    use tracing_subscriber::filter::LevelFilter;
    use tracing_subscriber::fmt::format::Format;
    use tracing_subscriber::layer::SubscriberExt as _;

    fn filter(text: &str) -> LogFilter {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn a_filter_is_a_level_or_levels_of_parts() {
        for (text, ours, steer) in [
            ("error", LevelFilter::ERROR, LevelFilter::ERROR),
            ("warn", LevelFilter::WARN, LevelFilter::WARN),
            ("warning", LevelFilter::WARN, LevelFilter::WARN),
            ("Warning", LevelFilter::WARN, LevelFilter::WARN),
            ("INFO", LevelFilter::INFO, LevelFilter::INFO),
            ("off", LevelFilter::OFF, LevelFilter::OFF),
            ("warn, metadata_steer=trace", LevelFilter::WARN, LevelFilter::TRACE),
            ("metadata_steer=debug", LevelFilter::INFO, LevelFilter::DEBUG),
            ("metadata_steer::ports=warning,debug", LevelFilter::DEBUG, LevelFilter::WARN),
        ] {
            let LogFilter(targets) = filter(text);
            for (target, most) in [("metadata_user::agent", ours), ("metadata_steer::ports", steer)] {
                for level in [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE] {
                    assert_eq!(
                        targets.would_enable(target, &level),
                        level <= most,
                        "{text}: {target} {level}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_word_that_is_no_level_is_refused_with_the_list_of_levels() {
        for text in ["", "verbose", "warnings", "metadata_steer", "info,verbose", "metadata_steer=loud", "3"]
        {
            let error = text.parse::<LogFilter>().expect_err(text);
            assert!(error.contains("off, error, warn, info, debug, trace"), "{text}: {error}");
        }
        assert!("info,warn".parse::<LogFilter>().is_err());
    }

    #[test]
    fn a_part_that_does_not_log_is_refused_with_the_list_of_those_that_do() {
        for text in
            ["foo=debug", "metadata_ste=info", "metadata_content=info", "a b=info", "=info", "[span]=info"]
        {
            let error = text.parse::<LogFilter>().expect_err(text);
            assert!(
                error.contains("metadata_feed, metadata_links") && error.contains("kube_client"),
                "{error}"
            );
        }
    }

    #[test]
    fn the_crates_that_log_are_those_that_depend_on_tracing() {
        /// The subscriber itself, and crates that the agent does not have.
        const OTHERS: [&str; 3] = ["loom", "tracing_subscriber", "xdp_imds_tests"];
        let lock = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.lock"));
        let logging = lock.split("[[package]]").filter(|package| package.contains("\n \"tracing\",\n"));
        let names =
            logging.filter_map(|package| package.split('"').nth(1)).map(|name| name.replace('-', "_"));
        let found: BTreeSet<_> = names.filter(|name| !OTHERS.contains(&name.as_str())).collect();
        // The program's own crate uses tracing through its library's manifest.
        let known = CRATES.into_iter().filter(|name| *name != "xdp_imds").map(str::to_owned).collect();
        assert_eq!(found, known);
    }

    #[test]
    fn the_kubernetes_client_is_silent_unless_it_is_named() {
        for (text, is_heard) in [("trace", false), ("info,kube_client=debug", true)] {
            let LogFilter(targets) = filter(text);
            assert_eq!(targets.would_enable("kube_client::client", &Level::ERROR), is_heard, "{text}");
        }
    }

    fn logged(form: LogFormat, events: impl FnOnce()) -> String {
        let (sink, form) = (LogCollector::default(), Arc::new(Mutex::new(form)));
        let writer = sink.clone();
        let layer = tracing_subscriber::fmt::layer()
            .event_format(LineFormat { form, text: Format::default().with_target(false) })
            .with_writer(move || writer.clone())
            .with_ansi(false);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), events);
        sink.text()
    }

    #[test]
    fn the_journal_gets_priorities_and_no_second_time() {
        let text = logged(LogFormat::Journal, || {
            tracing::error!("a");
            tracing::warn!(port = 1, "b");
            tracing::info!("c");
            tracing::debug!("d");
        });
        assert_eq!(text, "<3>ERROR a\n<4>WARN b port=1\n<6>INFO c\n<7>DEBUG d\n");
    }

    #[test]
    fn a_line_of_json_has_its_fields_and_nothing_that_a_terminal_obeys() {
        let text = logged(LogFormat::Json, || {
            tracing::warn!(port = "tap\u{9b}0\n", frames = 7, is_new = true, "it is \"gone\"");
            tracing::info!("plain");
        });
        let lines: Vec<_> = text.lines().collect();
        let [warning, plain] = lines[..] else { panic!("two lines expected: {text}") };
        assert!(warning.contains(r"tap\u009b0\n"), "{warning}");
        let mut value: serde_json::Value = serde_json::from_str(warning).expect("JSON");
        let timestamp = value["timestamp"].take();
        assert!(
            timestamp.as_str().is_some_and(|time| time.contains('T') && time.ends_with('Z')),
            "{timestamp}"
        );
        let expected = serde_json::json!({
            "timestamp": null,
            "level": "warn",
            "target": module_path!(),
            "message": "it is \"gone\"",
            "fields": {"port": "tap\u{9b}0\n", "frames": 7, "is_new": true},
        });
        assert_eq!(value, expected);
        let value: serde_json::Value = serde_json::from_str(plain).expect("JSON");
        assert_eq!((value["message"].as_str(), value.get("fields")), (Some("plain"), None));
    }

    #[test]
    fn the_oldest_warning_is_dropped_and_a_repeated_one_is_kept_once() {
        let mut kept = VecDeque::new();
        for n in 0..=KEPT {
            keep(&mut kept, Level::WARN, n.to_string());
            keep(&mut kept, Level::WARN, n.to_string());
        }
        let texts: Vec<_> = kept.iter().map(|warning| (warning.text.clone(), warning.times)).collect();
        assert_eq!(texts, (1..=KEPT).map(|n| (n.to_string(), 2)).collect::<Vec<_>>());
    }

    #[test]
    fn a_warning_is_kept_with_its_fields_and_within_its_limit() {
        tracing::subscriber::with_default(tracing_subscriber::registry().with(Recent), || {
            tracing::info!("nothing to see");
            tracing::warn!(port = "tap-of-this-test", "it is gone");
            tracing::error!("tap-of-this-test {}", "é".repeat(TEXT_MAX));
        });
        let ours: Vec<_> =
            recent_warnings().into_iter().filter(|said| said.text.contains("tap-of-this-test")).collect();
        assert_eq!(
            (ours[0].level.as_str(), ours[0].text.as_str()),
            ("warn", "it is gone port=\"tap-of-this-test\"")
        );
        assert_eq!(ours[1].level, "error");
        assert!(ours[1].text.len() <= TEXT_MAX && ours[1].text.ends_with('…'), "{:?}", ours[1]);
        assert_eq!(ours.len(), 2);
    }
}
