//! The small formats inside a configuration: lists of `key=value`, booleans, percent-encoding.

use std::borrow::Cow;
use std::collections::BTreeMap;

use percent_encoding::percent_decode_str;

/// What Perl's `\s` matches in octets.
pub(super) fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r' | '\x0b' | '\x0c')
}

/// Splits a list such as `virtio=BC:24:11:00:00:01,bridge=vmbr0` (`parse_property_string` in pve-common's JSONSchema.pm).
/// A part without `=` is the value of `default`; empty parts are dropped.
///
/// # Errors
/// A key occurs twice, or has no value; or a part has no key and the list has no default. The text says what was
/// expected and repeats no value.
pub(super) fn list<'a>(
    text: &'a str,
    default: Option<&'a str>,
) -> Result<BTreeMap<&'a str, &'a str>, &'static str> {
    let mut found = BTreeMap::new();
    for part in text.split(',').filter(|part| !part.chars().all(is_space)) {
        let (key, value) = match part.split_once('=') {
            Some((key, value)) if !key.is_empty() && !value.is_empty() => (key, value),
            Some(_) => return Err("a key and a value around each `=`"),
            None => (default.ok_or("`key=value`, separated by commas")?, part),
        };
        if found.insert(key, value).is_some() {
            return Err("each key once");
        }
    }
    Ok(found)
}

/// Reads a boolean (`parse_boolean` in JSONSchema.pm).
pub(super) fn boolean(text: &str) -> Option<bool> {
    let is = |words: [&str; 4]| words.iter().any(|word| text.eq_ignore_ascii_case(word));
    if is(["1", "on", "yes", "true"]) {
        return Some(true);
    }
    is(["0", "off", "no", "false"]).then_some(false)
}

/// Decodes `%2B` and the like; a `%` without two hex digits stays (Perl's `uri_unescape`).
pub(super) fn unescaped(text: &str) -> Cow<'_, [u8]> {
    percent_decode_str(text).into()
}

/// Splits a list of words (`PVE::Tools::split_list`: white space, commas, semicolons and NUL).
pub(super) fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c| is_space(c) || matches!(c, ',' | ';' | '\0')).filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::{boolean, list, unescaped, words};

    #[test]
    fn a_list_has_each_key_once_and_may_have_a_default() {
        let net = list("virtio=BC:24:11:00:00:01,bridge=vmbr0,,firewall=1", Some("model")).expect("a list");
        assert_eq!(net["virtio"], "BC:24:11:00:00:01");
        assert_eq!(net["firewall"], "1");
        assert_eq!(list("virtio,bridge=vmbr0", Some("model")).expect("a list")["model"], "virtio");
        assert_eq!(list("serial=ZHM9,base64=1", None).expect("a list")["serial"], "ZHM9");
        assert_eq!(list("a=b=c", None).expect("a list")["a"], "b=c");
        for wrong in ["a=1,a=2", "a=", "=a", "a"] {
            list(wrong, None).expect_err(wrong);
        }
    }

    #[test]
    fn booleans_have_four_words_each() {
        for (text, expected) in
            [("1", Some(true)), ("On", Some(true)), ("no", Some(false)), ("FALSE", Some(false)), ("2", None)]
        {
            assert_eq!(boolean(text), expected, "{text}");
        }
    }

    #[test]
    fn escapes_without_two_digits_stay() {
        assert_eq!(&*unescaped("ssh-rsa%20AA%2B%0A"), b"ssh-rsa AA+\n");
        assert_eq!(&*unescaped("100%, %zz %4"), b"100%, %zz %4");
    }

    #[test]
    fn words_are_separated_by_any_separator() {
        assert_eq!(words(" a;b, c\td ").collect::<Vec<_>>(), ["a", "b", "c", "d"]);
    }
}
