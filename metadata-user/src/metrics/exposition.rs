//! The Prometheus text format.

use std::fmt::{self, Write as _};
use std::time::Duration;

use metadata_common::printable::is_printable;

/// Type of a metric family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricType {
    /// A value that only grows while the agent runs; the name ends in `_total`.
    Counter,
    /// A value that can also decrease.
    Gauge,
    /// Counts of values per upper bound, with the sum and the number of all values.
    Histogram,
}

/// A time in seconds, to the nanosecond.
pub(super) struct Seconds(pub(super) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09}", self.0.as_secs(), self.0.subsec_nanos())
    }
}

/// Builder of the text.
#[derive(Clone, Debug, Default)]
pub struct Exposition {
    text: String,
}

impl Exposition {
    /// Adds a family: its head, and one line per sample. A sample has labels and a value. A family without samples is
    /// left out.
    pub fn family<'a, const N: usize, V: fmt::Display>(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        samples: impl IntoIterator<Item = ([(&'a str, &'a str); N], V)>,
    ) {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return;
        }
        self.head(name, help, kind);
        for (labels, value) in samples {
            self.text.push_str(name);
            for (i, (label, text)) in labels.into_iter().enumerate() {
                let open = if i == 0 { '{' } else { ',' };
                self.line(format_args!("{open}{label}=\"{}\"", Escaped { text, quotes: true }));
            }
            let close = if N == 0 { "" } else { "}" };
            self.line(format_args!("{close} {value}\n"));
        }
    }

    /// Adds a histogram. `counts` has the number of values in each bucket; the last bucket has no upper bound. `total`
    /// is the sum of all values.
    pub fn histogram(
        &mut self,
        name: &str,
        help: &str,
        bounds: &[Duration],
        counts: &[u64],
        total: Duration,
    ) {
        debug_assert!(counts.len() == bounds.len() + 1, "one bucket more than bounds");
        self.head(name, help, MetricType::Histogram);
        let (mut bounds, mut sum) = (bounds.iter(), 0);
        for count in counts {
            sum += count;
            match bounds.next() {
                Some(bound) => {
                    self.line(format_args!("{name}_bucket{{le=\"{}\"}} {sum}\n", bound.as_secs_f64()))
                }
                None => self.line(format_args!("{name}_bucket{{le=\"+Inf\"}} {sum}\n")),
            }
        }
        self.line(format_args!("{name}_sum {}\n{name}_count {sum}\n", Seconds(total)));
    }

    fn head(&mut self, name: &str, help: &str, kind: MetricType) {
        let kind = match kind {
            MetricType::Counter => "counter",
            MetricType::Gauge => "gauge",
            MetricType::Histogram => "histogram",
        };
        let help = Escaped { text: help, quotes: false };
        self.line(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    /// Returns the text.
    #[must_use]
    pub fn into_text(self) -> String {
        self.text
    }

    fn line(&mut self, line: fmt::Arguments<'_>) {
        let written = self.text.write_fmt(line);
        debug_assert!(written.is_ok(), "writing to a String does not fail");
    }
}

/// Displays a help text or label value. Backslashes and line feeds are escaped, unprintable characters are shown, and
/// quotes are escaped if `quotes` is true.
struct Escaped<'a> {
    text: &'a str,
    quotes: bool,
}

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.text.chars() {
            match c {
                '\\' => f.write_str("\\\\")?,
                '\n' => f.write_str("\\n")?,
                '"' if self.quotes => f.write_str("\\\"")?,
                c if is_printable(c) => f.write_char(c)?,
                // As others print it. The backslash is one of the text.
                c => write!(f, "\\{}", c.escape_unicode())?,
            }
        }
        Ok(())
    }
}
