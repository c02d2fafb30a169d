//! Formats quantities with three digits and a unit.

/// Formats a number with three significant digits, without trailing zeros.
pub(crate) fn number(value: f64) -> String {
    if !value.is_finite() {
        return "–".into();
    }
    let magnitude = if value == 0.0 { 0.0 } else { value.abs().log10().floor() };
    let decimals = (2.0 - magnitude).clamp(0.0, 6.0) as usize;
    let text = format!("{value:.decimals$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    thousands(text)
}

/// Separates groups of three digits by commas, in numbers of five digits or more.
fn thousands(text: &str) -> String {
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let digits = whole.trim_start_matches('-');
    if digits.len() < 5 {
        return text.to_owned();
    }
    let mut out = String::from(if whole.starts_with('-') { "-" } else { "" });
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out + rest
}

/// Formats a time, given in microseconds.
pub(crate) fn time(us: f64) -> String {
    match us.abs() {
        value if value >= 999_500.0 => format!("{} s", number(us / 1e6)),
        value if value >= 999.5 => format!("{} ms", number(us / 1e3)),
        _ => format!("{} µs", number(us)),
    }
}

/// Formats an amount of memory, given in bytes.
pub(crate) fn memory(bytes: f64) -> String {
    const KIB: f64 = 1024.0;
    match bytes.abs() {
        value if value >= KIB * KIB * KIB => format!("{} GiB", number(bytes / (KIB * KIB * KIB))),
        value if value >= KIB * KIB => format!("{} MiB", number(bytes / (KIB * KIB))),
        value if value >= KIB => format!("{} KiB", number(bytes / KIB)),
        _ => format!("{} B", number(bytes)),
    }
}

/// Formats a fraction of 1 as a percentage, with all of its nines.
pub(crate) fn share(share: f64) -> String {
    let percent = format!("{:.4}", share * 100.0);
    format!("{} %", percent.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::{memory, number, share, time};

    #[test]
    fn quantities_have_three_digits_and_a_unit() {
        assert_eq!(number(7.0), "7");
        assert_eq!(number(0.012_34), "0.0123");
        assert_eq!(number(1_234.5), "1234");
        assert_eq!(number(1_234_567.0), "1,234,567");
        assert_eq!(number(f64::NAN), "–");
        assert_eq!(time(430.0), "430 µs");
        assert_eq!(time(999.7), "1 ms");
        assert_eq!(time(1_250_000.0), "1.25 s");
        assert_eq!(memory(16_384.0), "16 KiB");
        assert_eq!(memory(3.5e9), "3.26 GiB");
        assert_eq!(share(0.999), "99.9 %");
        assert_eq!(share(0.0), "0 %");
    }
}
