//! YAML that is small in bytes and large once its aliases are expanded.

/// Number of leaves of the innermost list, and number of aliases of each of four lists around it.
pub(super) type Shape = (usize, usize);

/// A leaf: a mapping, because a parsed one takes most for its bytes.
const LEAF: &str = "{a},";
/// 800 bytes that expand to 7 million mappings. A parser that counts aliases rather than what they expand to accepts it.
pub(super) const LARGE: Shape = (137, 15);
/// Smaller: a record with it is accepted, and each parse of it takes some hundred MB.
pub(super) const MEDIUM: Shape = (50, 11);

/// Returns a network configuration of version 2 with five nested anchors.
pub(super) fn bomb(shape: Shape) -> String {
    format!("version: 2\nethernets: {{}}\n{}", anchors(shape).join("\n"))
}

/// Returns members of a mapping, each with an anchor that has aliases of the one before.
pub(super) fn anchors((leaves, width): Shape) -> Vec<String> {
    let mut lines = vec![format!("a: &a [{}]", LEAF.repeat(leaves))];
    for (name, inner) in [("b", "a"), ("c", "b"), ("d", "c"), ("e", "d")] {
        lines.push(format!("{name}: &{name} [{}]", vec![format!("*{inner}"); width].join(",")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::{LARGE, MEDIUM, bomb};

    #[test]
    fn a_bomb_is_smaller_than_its_name_says() {
        assert!(bomb(LARGE).len() <= 807, "{}", bomb(LARGE).len());
        assert!(bomb(MEDIUM).len() <= 760, "{}", bomb(MEDIUM).len());
    }
}
