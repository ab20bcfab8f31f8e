#include "env/wordle_words.hpp"

#include <array>

namespace prl::env {
namespace {

constexpr std::array<std::string_view, 681> kWords = {
    "about", "above", "abuse", "actor", "acute", "admit", "adopt", "adult", "after", "again", "agent", "agree", "ahead", "alarm", "album",
    "alert", "alike", "alive", "allow", "alone", "along", "alter", "among", "anger", "angle", "angry", "apart", "apple", "apply", "arena",
    "argue", "arise", "armor", "array", "aside", "asset", "audio", "audit", "avoid", "award", "aware", "bacon", "badge", "badly", "baker",
    "basic", "basin", "basis", "batch", "beach", "beard", "beast", "begin", "being", "below", "bench", "berry", "birth", "black", "blade",
    "blame", "blank", "blast", "blaze", "blend", "bless", "blind", "block", "blood", "bloom", "board", "boast", "bonus", "boost", "booth",
    "bound", "brain", "brake", "brand", "brave", "bread", "break", "breed", "brick", "bride", "brief", "bring", "broad", "brook", "broom",
    "brown", "brush", "build", "bunch", "burst", "buyer", "cabin", "cable", "camel", "candy", "canoe", "cargo", "carry", "carve", "catch",
    "cause", "cease", "chain", "chair", "chalk", "charm", "chart", "chase", "cheap", "check", "cheek", "cheer", "chess", "chest", "chief",
    "child", "chill", "choir", "chord", "civil", "claim", "clash", "class", "clean", "clear", "clerk", "click", "cliff", "climb", "clock",
    "close", "cloth", "cloud", "coach", "coast", "color", "comet", "coral", "could", "count", "court", "cover", "crack", "craft", "crane",
    "crash", "cream", "creek", "crime", "crisp", "cross", "crowd", "crown", "crude", "cruel", "crush", "curve", "cycle", "daily", "dairy",
    "dance", "dealt", "debut", "decay", "delay", "dense", "depth", "derby", "diary", "dirty", "ditch", "dizzy", "donor", "doubt", "dough",
    "dozen", "draft", "drain", "drama", "dream", "dress", "dried", "drift", "drill", "drink", "drive", "eager", "eagle", "early", "earth",
    "eaten", "elbow", "elder", "elect", "elite", "email", "empty", "enemy", "enjoy", "enter", "entry", "equal", "error", "essay", "event",
    "every", "exact", "exist", "extra", "fable", "faint", "fairy", "faith", "false", "fancy", "fault", "favor", "feast", "fence", "ferry",
    "fetch", "fever", "fiber", "field", "fifth", "fight", "final", "first", "flame", "flash", "fleet", "flesh", "float", "flock", "flood",
    "floor", "flour", "fluid", "flute", "focus", "force", "forge", "forty", "forum", "found", "frame", "fresh", "front", "frost", "fruit",
    "ghost", "giant", "given", "glass", "globe", "glory", "glove", "grace", "grade", "grain", "grand", "grant", "grape", "graph", "grasp",
    "grass", "grave", "great", "green", "greet", "grief", "grill", "group", "grove", "growl", "guard", "guess", "guest", "guide", "habit",
    "happy", "harsh", "haste", "haven", "heart", "heavy", "hedge", "hello", "hobby", "honey", "honor", "horse", "hotel", "house", "human",
    "humor", "hurry", "ideal", "image", "imply", "index", "inner", "input", "irony", "issue", "ivory", "jelly", "jewel", "joint", "jolly",
    "judge", "juice", "knife", "knock", "known", "label", "labor", "large", "laser", "later", "laugh", "layer", "learn", "lease", "leave",
    "legal", "lemon", "level", "lever", "light", "limit", "linen", "liver", "local", "lodge", "logic", "loose", "lover", "lower", "loyal",
    "lucky", "lunch", "magic", "major", "maker", "maple", "march", "marsh", "match", "maybe", "mayor", "medal", "media", "melon", "mercy",
    "merge", "merit", "metal", "meter", "might", "minor", "minus", "model", "moist", "money", "month", "moral", "motor", "mount", "mouse",
    "mouth", "movie", "music", "naval", "nerve", "never", "newly", "night", "noble", "noise", "north", "novel", "nurse", "ocean", "offer",
    "often", "olive", "onion", "opera", "orbit", "order", "organ", "other", "outer", "owner", "oxide", "paint", "panel", "paper", "party",
    "pasta", "patch", "pause", "peace", "peach", "pearl", "penny", "phase", "phone", "photo", "piano", "piece", "pilot", "pinch", "pizza",
    "place", "plain", "plane", "plant", "plate", "plaza", "point", "polar", "porch", "pound", "power", "press", "price", "pride", "prime",
    "print", "prize", "proof", "proud", "pulse", "punch", "pupil", "purse", "queen", "query", "quest", "quick", "quiet", "quite", "quota",
    "radar", "radio", "raise", "rally", "ranch", "range", "rapid", "ratio", "reach", "react", "ready", "realm", "rebel", "refer", "reign",
    "relax", "reply", "rider", "ridge", "rifle", "right", "rigid", "rival", "river", "roast", "robin", "robot", "rocky", "roman", "rough",
    "round", "route", "royal", "rugby", "ruler", "rural", "salad", "sauce", "scale", "scarf", "scene", "scent", "scope", "score", "scout",
    "screw", "sense", "serve", "seven", "shade", "shake", "shape", "share", "shark", "sharp", "sheep", "sheet", "shelf", "shell", "shift",
    "shine", "shirt", "shock", "shore", "short", "shout", "shrug", "sight", "silly", "since", "skill", "skirt", "sleep", "slice", "slide",
    "slope", "small", "smart", "smell", "smile", "smoke", "snake", "solar", "solid", "solve", "sound", "south", "space", "spare", "spark",
    "speak", "speed", "spell", "spend", "spice", "spine", "split", "spoon", "sport", "spray", "squad", "stack", "staff", "stage", "stair",
    "stamp", "stand", "start", "state", "steal", "steam", "steel", "steep", "stick", "still", "stone", "store", "storm", "story", "stove",
    "strip", "study", "stuff", "style", "sugar", "suite", "sunny", "super", "sweet", "swift", "swing", "sword", "table", "taste", "teach",
    "theme", "thick", "thief", "thing", "think", "third", "thorn", "three", "throw", "thumb", "tiger", "tight", "title", "toast", "today",
    "token", "tooth", "topic", "torch", "total", "touch", "tough", "towel", "tower", "toxic", "trace", "track", "trade", "trail", "train",
    "trait", "treat", "trend", "trial", "tribe", "trick", "truck", "truly", "trunk", "trust", "truth", "tulip", "twice", "twist", "uncle",
    "under", "union", "unite", "unity", "upper", "upset", "urban", "usual", "valid", "value", "valve", "vapor", "vault", "video", "virus",
    "visit", "vital", "vivid", "vocal", "voice", "voter", "wagon", "waist", "waste", "watch", "water", "weary", "weave", "wheat", "wheel",
    "where", "which", "while", "white", "whole", "widow", "width", "woman", "world", "worry", "worth", "would", "wound", "wrist", "write",
    "wrong", "yacht", "yield", "young", "youth", "zebra",
};

}  // namespace

std::span<const std::string_view> wordle_words() { return kWords; }

}  // namespace prl::env
