//! Time, as an argument.
//!
//! Only `worker` reads a clock. All other modules of the data path receive the time as an argument.

use std::ops::RangeInclusive;
use std::time::Duration;

/// A moment, by the two clocks of the data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Time since an arbitrary start, monotonic: for deadlines and retransmission.
    pub mono: Duration,
    /// Seconds since 1970-01-01 UTC: for the `Date` header.
    pub unix_seconds: u64,
}

/// Units of a written time, longest spelling first where one ends another.
const UNITS: [(&str, f64); 4] = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3_600.0)];

/// Parses a time that somebody wrote: seconds (`5`, `0.5`), or a number with a unit (`500ms`, `5s`, `1m`, `1h`).
#[must_use]
pub fn span(text: &str) -> Option<Duration> {
    let text = text.trim();
    let (number, unit) = UNITS
        .iter()
        .find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, *seconds)))
        .unwrap_or((text, 1.0));
    let is_plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let number = number.parse::<f64>().ok().filter(|_| is_plain)?;
    Duration::try_from_secs_f64(number * unit).ok()
}

/// Parses a time like [`span`], within limits.
///
/// # Errors
/// The text names the forms and the limits.
pub fn span_within(text: &str, limits: RangeInclusive<Duration>) -> Result<Duration, String> {
    span(text).filter(|span| limits.contains(span)).ok_or_else(|| {
        let (least, most) = (limits.start().as_secs_f64(), limits.end().as_secs_f64());
        format!("expected a time such as `5`, `5s` or `500ms`, from {least}s to {most}s")
    })
}

#[cfg(test)]
mod tests {
    use super::{span, span_within};
    use std::time::Duration;

    #[test]
    fn a_time_is_a_number_of_seconds_or_has_a_unit() {
        for (text, millis) in [
            ("5", 5_000),
            ("5s", 5_000),
            ("0", 0),
            ("0.2", 200),
            ("1.5s", 1_500),
            ("500ms", 500),
            ("1m", 60_000),
            ("1h", 3_600_000),
            (" 2s ", 2_000),
        ] {
            assert_eq!(span(text), Some(Duration::from_millis(millis)), "{text}");
        }
        for text in [
            "",
            "s",
            "-1",
            "+1",
            "1e3",
            "nan",
            "inf",
            "5 s x",
            "5d",
            "1ms5",
            "1..2",
            "99999999999999999999999h",
        ] {
            assert_eq!(span(text), None, "{text}");
        }
    }

    #[test]
    fn a_time_beyond_its_limits_is_refused_with_them() {
        let limits = Duration::from_millis(200)..=Duration::from_secs(20);
        assert_eq!(span_within("20s", limits.clone()), Ok(Duration::from_secs(20)));
        for text in ["0.1", "21s", "fast"] {
            let error = span_within(text, limits.clone()).expect_err(text);
            assert!(error.contains("from 0.2s to 20s") && error.contains("`5s`"), "{error}");
        }
    }
}
