//! The order of names in lists for people: numbers in names count as numbers, so that `vx2` comes before `vx10`.
//!
//! Documents for programs have the order of texts, by which they are paged.

use std::cmp::Ordering;

/// A name as a key of this order. Only equal texts are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NaturalName<'a>(pub &'a str);

impl Ord for NaturalName<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        natural(self.0, other.0)
    }
}

impl PartialOrd for NaturalName<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Compares two names. Decimal digits in a row are one number of any length; everything else is compared by bytes.
#[must_use]
pub fn natural(one: &str, other: &str) -> Ordering {
    let (mut left, mut right) = (one.as_bytes(), other.as_bytes());
    loop {
        match (left, right) {
            ([a, ..], [b, ..]) if a.is_ascii_digit() && b.is_ascii_digit() => {
                let ((mine, left_rest), (theirs, right_rest)) = (number(left), number(right));
                // Without leading zeros, the longer number is the larger one.
                let order = mine.len().cmp(&theirs.len()).then_with(|| mine.cmp(theirs));
                if order.is_ne() {
                    return order;
                }
                (left, right) = (left_rest, right_rest);
            }
            ([a, left_rest @ ..], [b, right_rest @ ..]) if a == b => (left, right) = (left_rest, right_rest),
            // They differ here, or one has ended; equal ones differ at most in leading zeros.
            _ => return left.first().cmp(&right.first()).then_with(|| one.cmp(other)),
        }
    }
}

/// The number at the start without its leading zeros, and the rest.
fn number(text: &[u8]) -> (&[u8], &[u8]) {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let zeros = text.iter().take(digits).take_while(|byte| **byte == b'0').count();
    let (digits, rest) = text.split_at(digits);
    (digits.split_at(zeros).1, rest)
}

#[cfg(test)]
mod tests {
    use super::{NaturalName, natural};
    use std::cmp::Ordering;

    #[test]
    fn numbers_in_names_count_as_numbers() {
        for (names, what) in [
            (&["vx1", "vx2", "vx10"][..], "numbers at the end"),
            (&["vm-2-b", "vm-10-a", "vm-10-b"], "numbers in the middle"),
            (&["9", "10", "a"], "numbers alone"),
            (&["", "a", "a1", "ab"], "a shorter name"),
            (&["Web1", "web", "web-1", "web1", "web1a"], "letters and signs by their bytes"),
            (&["vx01", "vx1", "vx001b", "vx1c", "vx02"], "leading zeros, which decide last"),
            (&["x18446744073709551616", "x18446744073709551617", "x99999999999999999999"], "no machine word"),
            (&["é2", "é10", "ü1"], "letters of several bytes"),
            (&["tap1", "tap2@ns", "tap10"], "ports"),
        ] {
            let mut sorted = names.to_vec();
            sorted.reverse();
            sorted.sort_by(|one, other| natural(one, other));
            assert_eq!(sorted, names, "{what}");
            sorted.reverse();
            sorted.sort_by_key(|&name| NaturalName(name));
            assert_eq!(sorted, names, "{what}");
        }
    }

    #[test]
    fn the_order_is_total_and_only_equal_texts_are_equal() {
        let names =
            ["", "0", "00", "1", "01", "1a", "a", "a0", "a00", "a1", "a01", "a10", "a2", "a-1", "b", "é"];
        for one in names {
            for other in names {
                let order = natural(one, other);
                assert_eq!(order, natural(other, one).reverse(), "{one} {other}");
                assert_eq!(order == Ordering::Equal, one == other, "{one} {other}");
                for third in names {
                    let is_chain = order.is_lt() && natural(other, third).is_lt();
                    assert!(!is_chain || natural(one, third).is_lt(), "{one} {other} {third}");
                }
            }
        }
    }
}
