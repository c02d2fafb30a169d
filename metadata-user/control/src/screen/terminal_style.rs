//! What the terminal can show.

use ratatui::style::{Color, Modifier, Style};

/// What the terminal can show. No meaning is in a colour alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalStyle {
    /// It has colours, and the user wants them.
    pub colour: bool,
    /// It shows characters beyond ASCII.
    pub unicode: bool,
}

impl TerminalStyle {
    /// Plain ASCII.
    pub const PLAIN: Self = Self { colour: false, unicode: false };

    /// What the variables of the environment say: `NO_COLOR` (<https://no-color.org>), `TERM`, and the locale
    /// (locale(7)).
    #[must_use]
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        let dumb = given("TERM").is_none_or(|term| term == "dumb");
        let locale = given("LC_ALL").or_else(|| given("LC_CTYPE")).or_else(|| given("LANG"));
        let is_utf8 = |locale: String| {
            let locale = locale.to_ascii_lowercase();
            locale.contains("utf-8") || locale.contains("utf8")
        };
        Self { colour: !dumb && given("NO_COLOR").is_none(), unicode: !dumb && locale.is_some_and(is_utf8) }
    }

    /// The style of the title. It stands out if somebody needs to look.
    pub(crate) fn title(self, is_well: bool) -> Style {
        if is_well {
            Style::new().add_modifier(Modifier::REVERSED)
        } else {
            self.bad().add_modifier(Modifier::REVERSED)
        }
    }

    /// The style of heads and of names.
    pub(crate) fn strong(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// The style of what needs attention.
    pub(crate) fn bad(self) -> Style {
        let style = self.strong();
        if self.colour { style.fg(Color::Red) } else { style }
    }

    /// The style of what waits.
    pub(crate) fn waits(self) -> Style {
        let style = self.strong();
        if self.colour { style.fg(Color::Yellow) } else { style }
    }

    /// The style of what goes on now.
    pub(crate) fn busy(self) -> Style {
        if self.colour { Style::new().fg(Color::Green) } else { Style::new() }
    }

    /// What stands for the characters that were cut.
    fn cut(self) -> char {
        if self.unicode { '…' } else { '~' }
    }

    /// A text of at most `width` characters; its end is cut.
    pub(crate) fn shorten(self, text: &str, width: usize) -> String {
        if text.chars().count() <= width {
            return text.to_owned();
        }
        text.chars().take(width.saturating_sub(1)).chain((width > 0).then(|| self.cut())).collect()
    }

    /// A text of at most `width` characters; its middle is cut: names and paths often differ at their ends.
    pub(crate) fn shorten_middle(self, text: &str, width: usize) -> String {
        let length = text.chars().count();
        let (begin, end) = (width / 2, width.saturating_sub(width / 2 + 1));
        if length <= width || end == 0 {
            return self.shorten(text, width);
        }
        text.chars().take(begin).chain([self.cut()]).chain(text.chars().skip(length - end)).collect()
    }

    /// The characters of a bar, from empty to full.
    pub(crate) fn bars(self) -> &'static [&'static str] {
        if self.unicode {
            &[" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"]
        } else {
            &[" ", ".", ":", "-", "=", "+", "*", "#"]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::TerminalStyle;

    #[test]
    fn a_long_text_shows_that_it_was_cut() {
        let look = TerminalStyle { unicode: true, ..TerminalStyle::PLAIN };
        for (text, width, end, middle) in [
            ("web-1", 5, "web-1", "web-1"),
            ("web-10", 5, "web-…", "we…10"),
            ("prod-api-7c9f-a", 10, "prod-api-…", "prod-…9f-a"),
            ("ab", 1, "…", "…"),
            ("abc", 2, "a…", "a…"),
            ("ab", 0, "", ""),
            ("äöüß", 3, "äö…", "ä…ß"),
        ] {
            assert_eq!((&*look.shorten(text, width), &*look.shorten_middle(text, width)), (end, middle));
        }
        assert_eq!(TerminalStyle::PLAIN.shorten("web-10", 5), "web-~");
    }

    #[test]
    fn the_environment_chooses_colours_and_characters() {
        for (variables, colour, unicode) in [
            (&[("TERM", "xterm"), ("LANG", "en_GB.UTF-8")][..], true, true),
            (&[("TERM", "xterm"), ("LANG", "C")], true, false),
            (&[("TERM", "xterm"), ("LC_ALL", "C"), ("LANG", "en_GB.UTF-8")], true, false),
            (&[("TERM", "xterm"), ("NO_COLOR", "1"), ("LC_CTYPE", "C.utf8")], false, true),
            (&[("TERM", "xterm"), ("NO_COLOR", "")], true, false),
            (&[("TERM", "dumb"), ("LANG", "C.UTF-8")], false, false),
            (&[], false, false),
        ] {
            let variable = |name: &str| {
                variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
            };
            assert_eq!(TerminalStyle::of(variable), TerminalStyle { colour, unicode }, "{variables:?}");
        }
    }
}
