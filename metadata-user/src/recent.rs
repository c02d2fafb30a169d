//! Keeps the last warnings, so that `xdp-imds status` can show them.

use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use metadata_control::status::RecentWarning;

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
pub fn last() -> Vec<RecentWarning> {
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

#[cfg(test)]
mod tests {
    use super::{KEPT, Recent, TEXT_MAX, keep, last};
    use std::collections::VecDeque;
    use tracing::Level;
    use tracing_subscriber::layer::SubscriberExt as _;

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
        let ours: Vec<_> = last().into_iter().filter(|said| said.text.contains("tap-of-this-test")).collect();
        assert_eq!(
            (ours[0].level.as_str(), ours[0].text.as_str()),
            ("warn", "it is gone port=\"tap-of-this-test\"")
        );
        assert_eq!(ours[1].level, "error");
        assert!(ours[1].text.len() <= TEXT_MAX && ours[1].text.ends_with('…'), "{:?}", ours[1]);
        assert_eq!(ours.len(), 2);
    }
}
