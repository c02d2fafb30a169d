//! The Prometheus text format.

use std::fmt::{self, Write as _};
use std::time::Duration;

/// Type of a metric family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows until the agent restarts; its name ends in `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Number of values up to each bound, number of all values, and their sum.
    Histogram,
}

/// Displays a time in seconds with nine decimals.
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
    /// Adds a family: its head, and one line for each sample, which has labels and a value. Adds nothing if there is no
    /// sample.
    pub fn family<'a, const N: usize, V: fmt::Display>(
        &mut self,
        name: &str,
        help: &str,
        kind: Kind,
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

    /// Adds a histogram. `counts` has the number of values in each bucket: one bucket up to each of the `bounds`, and
    /// one above the last. `total` is the sum of all values.
    pub fn histogram(
        &mut self,
        name: &str,
        help: &str,
        bounds: &[Duration],
        counts: &[u64],
        total: Duration,
    ) {
        debug_assert!(counts.len() == bounds.len() + 1, "one bucket more than bounds");
        self.head(name, help, Kind::Histogram);
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

    fn head(&mut self, name: &str, help: &str, kind: Kind) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
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
        debug_assert!(written.is_ok(), "a String takes everything");
    }
}

/// Displays a help text or a label value with backslash and line feed escaped, and with `quotes` the double quote too.
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
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}
