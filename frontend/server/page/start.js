"use strict";
/* The page begins. */

setTheme(recall(browserStore, "quire-theme"));
health("");
const lastShown = stored(ENTRY + recall(tabStore, "quire-shown"));
if (lastShown) showConversation(lastShown);
else showMode();
if (!narrow.matches) $("prompt").focus();
poke();
offerModels();
