//! The view on a real terminal: keys, redrawing what changed, and leaving the terminal as it was.

use ratatui::crossterm::event::{Event, KeyEventKind};
use ratatui::crossterm::{event, terminal};
use ratatui::style::{Color, Modifier, Style};
use ratatui::{DefaultTerminal, Frame};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::{self, IsTerminal as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use crate::screen::draw::draw;
use crate::screen::{Documents, KeyAction, Screen, ViewQuery};

/// How often to look for keys, answers and signals.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The size of a screen where there is no terminal.
pub const SIZE: (u16, u16) = (80, 24);

/// The exit code after SIGHUP, as of a program that the signal ends.
const HUNG_UP: i32 = 129;

/// Asks the agent; the error is a text for people.
pub type Fetch = Box<dyn FnMut(&ViewQuery) -> Result<Documents, String> + Send>;

/// The size of the terminal, or [`SIZE`].
#[must_use]
pub fn size() -> (u16, u16) {
    let known = || terminal::size().ok().filter(|(width, height)| *width > 0 && *height > 0);
    if io::stdout().is_terminal() { known().unwrap_or(SIZE) } else { SIZE }
}

/// True if standard output is a terminal that can move its cursor.
#[must_use]
pub fn can_draw() -> bool {
    let is_dumb = std::env::var("TERM").map_or(true, |term| term.is_empty() || term == "dumb");
    io::stdout().is_terminal() && io::stdin().is_terminal() && !is_dumb
}

/// Ends the process when its terminal is gone: there is nothing to leave as it was, and a read of it may not end.
///
/// # Errors
/// The signal cannot be handled.
pub fn exit_on_hang_up() -> io::Result<()> {
    let always = Arc::new(AtomicBool::new(true));
    signal_hook::flag::register_conditional_shutdown(SIGHUP, HUNG_UP, always).map(drop)
}

/// Sets a flag when the terminal is gone, instead of ending the process.
///
/// # Errors
/// The signal cannot be handled.
pub fn note_hang_up(flag: &Arc<AtomicBool>) -> io::Result<()> {
    signal_hook::flag::register(SIGHUP, Arc::clone(flag)).map(drop)
}

/// What ends the view, apart from `q`.
#[derive(Clone, Debug, Default)]
pub struct EndConditions {
    /// There is nothing more to show.
    pub over: Arc<AtomicBool>,
    /// The user wants the program to end. Ctrl-C and signals set it, and continue to do so after the view.
    pub interrupted: Arc<AtomicBool>,
}

impl EndConditions {
    fn is_reached(&self) -> bool {
        self.over.load(Ordering::Relaxed) || self.interrupted.load(Ordering::Relaxed)
    }
}

/// Shows the view until it ends. Asks every `interval`. The terminal is then as it was, even after a panic.
///
/// # Errors
/// The terminal cannot be used.
pub fn run(
    screen: Screen,
    look: TerminalStyle,
    interval: Duration,
    fetch: Fetch,
    ends: EndConditions,
) -> io::Result<()> {
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&ends.interrupted))?;
    }
    let questions = QueryThread::start(fetch)?;
    // This also installs a hook that restores the terminal on a panic.
    let mut terminal = ratatui::try_init()?;
    let shown = View { screen, look, interval, questions, ends }.show(&mut terminal);
    let restored = ratatui::try_restore();
    if restored.is_err() || is_hung_up(Duration::ZERO).unwrap_or(true) {
        // The terminal is gone. Dropping this value would write to it, and panic when that fails.
        std::mem::forget(terminal);
    }
    shown.and(restored)
}

/// The thread that asks, so that keys work while the agent is slow.
struct QueryThread {
    asked: Sender<ViewQuery>,
    answers: Receiver<Result<Documents, String>>,
}

impl QueryThread {
    fn start(mut fetch: Fetch) -> io::Result<Self> {
        let (asked, questions) = channel::<ViewQuery>();
        let (reply, answers) = channel();
        let body = move || {
            while let Ok(question) = questions.recv() {
                if reply.send(fetch(&question)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("imds-top".into()).spawn(body)?;
        Ok(Self { asked, answers })
    }
}

struct View {
    screen: Screen,
    look: TerminalStyle,
    interval: Duration,
    questions: QueryThread,
    ends: EndConditions,
}

impl View {
    fn show(mut self, terminal: &mut DefaultTerminal) -> io::Result<()> {
        let (mut ask_at, mut is_asking, mut changed) = (Instant::now(), false, true);
        while !self.ends.is_reached() {
            if !is_asking && Instant::now() >= ask_at {
                is_asking = self.questions.asked.send(self.screen.asked()).is_ok();
                ask_at = Instant::now() + self.interval;
            }
            match self.questions.answers.try_recv() {
                Ok(answer) => {
                    self.screen.on_answer(answer);
                    (is_asking, changed) = (false, true);
                }
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => {
                    return Err(io::Error::other("the thread that asks the agent has ended"));
                }
            }
            if std::mem::take(&mut changed) {
                terminal.draw(|frame: &mut Frame<'_>| draw(&self.screen, self.look, frame.buffer_mut()))?;
            }
            if is_hung_up(LOOK_EVERY)? {
                return Ok(());
            }
            if !event::poll(Duration::ZERO)? {
                continue;
            }
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release => match self.screen.on_key(key) {
                    KeyAction::Nothing => {}
                    KeyAction::Draw if is_redraw(key) => {
                        terminal.clear()?;
                        changed = true;
                    }
                    KeyAction::Draw => changed = true,
                    KeyAction::Ask => (ask_at, changed) = (Instant::now(), true),
                    KeyAction::Quit => return Ok(()),
                    KeyAction::Interrupt => self.ends.interrupted.store(true, Ordering::Relaxed),
                },
                Event::Resize(..) => changed = true,
                _ => {}
            }
        }
        Ok(())
    }
}

/// Waits for a key. Returns whether the terminal is gone, which crossterm would read for ever.
fn is_hung_up(limit: Duration) -> io::Result<bool> {
    let limit = Timespec::try_from(limit).map_err(|_| io::ErrorKind::InvalidInput)?;
    let input = io::stdin();
    let mut watched = [PollFd::new(&input, PollFlags::IN)];
    match poll(&mut watched, Some(&limit)) {
        Ok(_) | Err(Errno::INTR) => Ok(watched[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)),
        Err(error) => Err(error.into()),
    }
}

/// Ctrl-L, after which the terminal may show anything.
fn is_redraw(key: event::KeyEvent) -> bool {
    key.code == event::KeyCode::Char('l') && key.modifiers.contains(event::KeyModifiers::CONTROL)
}

// What the terminal can show.

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
