//! Keys.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::{Screen, Shown};

/// Lines that a page key moves.
const PAGE: usize = 10;

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaction {
    /// Nothing.
    Nothing,
    /// Draw again.
    Draw,
    /// Ask the agent at once, and draw.
    Ask,
    /// End the view.
    Quit,
    /// End the view, and what it shows if that was started with it.
    Interrupt,
}

impl Screen {
    /// Handles a key.
    pub fn on_key(&mut self, key: KeyEvent) -> Reaction {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Reaction::Interrupt,
                KeyCode::Char('l') => Reaction::Draw,
                _ => Reaction::Nothing,
            };
        }
        if self.typed.is_some() {
            return self.on_typed(key.code);
        }
        match (key.code, &self.shown) {
            (KeyCode::Char('q'), Shown::Node) => return Reaction::Quit,
            (
                KeyCode::Char('q') | KeyCode::Esc | KeyCode::Backspace | KeyCode::Left,
                Shown::Vm(_) | Shown::Help,
            ) => {
                self.shown = Shown::Node;
            }
            (KeyCode::Char('?' | 'h'), _) => self.shown = Shown::Help,
            (_, Shown::Vm(_) | Shown::Help) => return Reaction::Nothing,
            (KeyCode::Char('/'), Shown::Node) => self.typed = Some(self.query.filter.clone()),
            (KeyCode::Char('s'), Shown::Node) => {
                self.query.sort = self.query.sort.next();
                self.selected = 0;
                return Reaction::Ask;
            }
            (KeyCode::Esc, Shown::Node) if !self.query.filter.is_empty() => {
                self.query.filter.clear();
                return Reaction::Ask;
            }
            (KeyCode::Enter | KeyCode::Right, Shown::Node) => {
                let Some(row) = self.chosen() else { return Reaction::Nothing };
                self.shown = Shown::Vm(row.mac.clone());
                return Reaction::Ask;
            }
            (code, Shown::Node) => return self.on_move(code),
        }
        Reaction::Draw
    }

    fn on_move(&mut self, code: KeyCode) -> Reaction {
        let at = match code {
            KeyCode::Down | KeyCode::Char('j') => self.selected + 1,
            KeyCode::Up | KeyCode::Char('k') => self.selected.saturating_sub(1),
            KeyCode::PageDown | KeyCode::Char(' ') => self.selected + PAGE,
            KeyCode::PageUp => self.selected.saturating_sub(PAGE),
            KeyCode::Home | KeyCode::Char('g') => 0,
            KeyCode::End | KeyCode::Char('G') => usize::MAX,
            _ => return Reaction::Nothing,
        };
        self.select(at);
        Reaction::Draw
    }

    /// A key while the filter is typed.
    fn on_typed(&mut self, code: KeyCode) -> Reaction {
        match code {
            KeyCode::Enter => {
                self.query.filter = self.typed.take().unwrap_or_default();
                self.selected = 0;
                return Reaction::Ask;
            }
            KeyCode::Esc => self.typed = None,
            KeyCode::Backspace => _ = self.typed.as_mut().and_then(String::pop),
            KeyCode::Char(letter) => self.type_in(letter),
            _ => return Reaction::Nothing,
        }
        Reaction::Draw
    }
}
