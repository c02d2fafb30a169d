//! Numbers and times as people read them.

/// A count with separators: `12,345`.
#[must_use]
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A rate: with one digit after the point below 10.
#[must_use]
pub fn rate(each_second: f64) -> String {
    if each_second > 0.0 && each_second < 9.95 {
        format!("{each_second:.1}/s")
    } else {
        format!("{}/s", count(each_second.round() as u64))
    }
}

/// A time in seconds, in at most six characters.
#[must_use]
pub fn time(seconds: f64) -> String {
    match seconds {
        short if short < 9.95 => format!("{:.1} s", short.max(0.0)),
        short if short < 99.5 => format!("{short:.0} s"),
        long if long < 6_000.0 => format!("{:.0} m", long / 60.0),
        long if long < 359_400.0 => format!("{:.0} h", long / 3_600.0),
        long => format!("{:.0} d", long / 86_400.0),
    }
}

/// A bound in microseconds; `None` is beyond the largest bucket, which ends at a second.
#[must_use]
pub fn bound(us: Option<u64>) -> String {
    us.map_or_else(|| "over 1 s".into(), micros)
}

/// A time in microseconds.
#[must_use]
pub fn micros(us: u64) -> String {
    match us {
        0..1_000 => format!("{us} us"),
        1_000..1_000_000 => format!("{} ms", trimmed(us as f64 / 1_000.0)),
        _ => format!("{} s", trimmed(us as f64 / 1_000_000.0)),
    }
}

fn trimmed(number: f64) -> String {
    let text = format!("{number:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// A number of bytes with its unit.
#[must_use]
pub fn byte_size(number: u64) -> String {
    match number {
        0..10_240 => format!("{number} B"),
        10_240..10_485_760 => format!("{} KiB", number >> 10),
        _ => format!("{} MiB", number >> 20),
    }
}

/// A line of bars, one for each count, the newest last; at most `width`.
#[must_use]
pub fn bars(counts: &[u64], width: usize, bars: &[&str]) -> String {
    let shown = &counts[counts.len().saturating_sub(width)..];
    let most = shown.iter().copied().max().unwrap_or_default().max(1);
    let full = bars.len() as u64 - 1;
    let bar =
        |count: &u64| bars[usize::try_from(count.saturating_mul(full).div_ceil(most)).unwrap_or_default()];
    shown.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::{bars, bound, byte_size, count, micros, rate, time};

    #[test]
    fn figures_are_short() {
        let counts = [(0, "0"), (999, "999"), (1_000, "1,000"), (1_234_567, "1,234,567")];
        counts.iter().for_each(|(number, text)| assert_eq!(count(*number), *text));
        let rates = [(0.0, "0/s"), (0.25, "0.2/s"), (9.94, "9.9/s"), (9.95, "10/s"), (12_345.4, "12,345/s")];
        rates.iter().for_each(|(number, text)| assert_eq!(rate(*number), *text));
        let times = [
            (-1.0, "0.0 s"),
            (9.94, "9.9 s"),
            (99.4, "99 s"),
            (100.0, "2 m"),
            (7_200.0, "2 h"),
            (864_000.0, "10 d"),
        ];
        times.iter().for_each(|(seconds, text)| assert_eq!(time(*seconds), *text));
        let bounds =
            [(Some(50), "50 us"), (Some(2_500), "2.5 ms"), (Some(1_000_000), "1 s"), (None, "over 1 s")];
        bounds.iter().for_each(|(us, text)| assert_eq!(bound(*us), *text));
        assert_eq!(micros(10_000), "10 ms");
        let sizes = [(300, "300 B"), (65_536, "64 KiB"), (20 << 20, "20 MiB")];
        sizes.iter().for_each(|(number, text)| assert_eq!(byte_size(*number), *text));
    }

    #[test]
    fn the_highest_bar_is_full_and_only_zero_is_empty() {
        let shapes = [" ", ".", ":", "#"];
        for (counts, width, text) in [
            (&[][..], 5, ""),
            (&[0, 0], 5, "  "),
            (&[0, 1, 50, 100], 5, " .:#"),
            (&[100, 1, 2, 3], 3, ".:#"),
            (&[u64::MAX, 0], 5, ". "),
        ] {
            assert_eq!(bars(counts, width, &shapes), text, "{counts:?}");
        }
    }
}
